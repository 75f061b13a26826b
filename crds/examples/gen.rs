//! Writes the YAML of every definition into the folder given as the first argument, by default beside this package's
//! `Cargo.toml`, where it is committed.

use std::error::Error;
use std::path::{Path, PathBuf};

fn main() -> Result<(), Box<dyn Error>> {
    let folder =
        std::env::args_os().nth(1).map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).to_owned(), PathBuf::from);
    for (name, text) in cistern_crds::yaml()? {
        std::fs::write(folder.join(&name), text)?;
        println!("crds/{name}");
    }
    Ok(())
}
