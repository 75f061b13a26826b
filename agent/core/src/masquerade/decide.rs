//! The rules of the kernel program once more, for `explain` and for the table of cases that runs on both.
