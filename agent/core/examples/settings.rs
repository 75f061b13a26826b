//! Writes the table of settings, `settings.md`, into the folder that is the first argument; without one, beside this
//! package's `Cargo.toml`, where it is committed.

use std::path::{Path, PathBuf};

fn main() -> std::io::Result<()> {
    let folder =
        std::env::args_os().nth(1).map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).to_owned(), PathBuf::from);
    #[expect(clippy::disallowed_methods, reason = "a generator writes its file; nothing is decided here")]
    std::fs::write(folder.join("settings.md"), cistern_core::settings::markdown())
}
