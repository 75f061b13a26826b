//! Writes the generated YAML of every definition beside this package's `Cargo.toml`.

use std::error::Error;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    for (name, text) in cistern_crds::yaml()? {
        std::fs::write(Path::new(env!("CARGO_MANIFEST_DIR")).join(&name), text)?;
        println!("crds/{name}");
    }
    Ok(())
}
