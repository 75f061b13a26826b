//! The difference between two ordered maps, adds and updates before deletes.
