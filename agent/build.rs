//! Embeds the eBPF object when it has been built: `target/ebpf/cistern.o`, or the file that `CISTERN_EBPF_OBJECT` names.
//!
//! Without one the agent still builds; it then says so, and refuses what needs the datapath.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

const OVERRIDE: &str = "CISTERN_EBPF_OBJECT";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-env-changed={OVERRIDE}");
    let named = env::var_os(OVERRIDE).map(PathBuf::from);
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").ok_or("cargo sets CARGO_MANIFEST_DIR")?);
    let variant = env::var_os("CARGO_FEATURE_TEST_VARIANT").is_some();
    let name = if variant { "cistern-test-variant.o" } else { "cistern.o" };
    let object = named.clone().unwrap_or_else(|| manifest.join("../target/ebpf").join(name));
    println!("cargo:rerun-if-changed={}", object.display());

    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?);
    match fs::read(&object) {
        Ok(bytes) => {
            fs::write(Path::new(&out).join("cistern.o"), bytes)?;
            println!("cargo:rustc-cfg=cistern_ebpf");
            Ok(())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound && named.is_none() => Ok(()),
        Err(error) => Err(format!("{OVERRIDE}: cannot read {}: {error}", object.display()).into()),
    }
}
