//! Prints the table of settings: what `agent/core/settings.md` holds.

fn main() {
    print!("{}", cistern_core::settings::markdown());
}
