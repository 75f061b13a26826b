//! Container images built without a registry: a program and its dependencies, in an archive in the cache.

use super::binaries::{Binaries, cache};
use super::daemon::PAUSE_IMAGE;
use super::pki::{Authority, Subject};
use super::say;
use crate::lab::output;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Kubernetes' test program agnhost, with a shell, busybox and curl.
pub const AGNHOST_IMAGE: &str = "localhost/agnhost:1";
/// The cluster's DNS server.
pub(super) const COREDNS_IMAGE: &str = "localhost/coredns:1";

/// agnhost with the tools that conformance specs call, under any of the suite's names.
pub(super) const TOOLS_IMAGE: &str = "localhost/conformance:1";
/// The server of one spec, which sends packets that connection tracking considers invalid.
pub(super) const REGRESSION_IMAGE: &str = "localhost/conformance-regression:1";
/// Entry point of agnhost.
const AGNHOST_START: &str = "ENTRYPOINT [\"/agnhost\"]\nCMD [\"pause\"]";

/// The images on every node.
pub(super) fn all(binaries: &Binaries) -> Result<Vec<(&'static str, PathBuf)>> {
    let pause = cached(&cache()?.join("kubernetes/pause"), PAUSE_IMAGE, "ENTRYPOINT [\"/pause\"]", |root| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("kubernetes/pause.rs");
        let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
        rustc.args([
            "--edition",
            "2024",
            "-O",
            "-C",
            "target-feature=+crt-static",
            "-C",
            "panic=abort",
            "-C",
            "strip=symbols",
        ]);
        output(rustc.arg("-o").arg(root.join("pause")).arg(source), "compile pause.rs").map(drop)
    })?;
    let agnhost =
        cached(&binaries.folder("kubernetes")?, AGNHOST_IMAGE, AGNHOST_START, |root| fill_agnhost(binaries, root))?;
    let coredns = cached(&binaries.folder("coredns")?, COREDNS_IMAGE, "ENTRYPOINT [\"/coredns\"]", |root| {
        fs::copy(binaries.find("coredns")?, root.join("coredns"))?;
        Ok(())
    })?;
    Ok(vec![(PAUSE_IMAGE, pause), (AGNHOST_IMAGE, agnhost), (COREDNS_IMAGE, coredns)])
}

/// Additional images of the conformance run.
pub(super) fn of_conformance(binaries: &Binaries) -> Result<Vec<(&'static str, PathBuf)>> {
    let folder = binaries.folder("kubernetes")?;
    let tools = cached(&folder, TOOLS_IMAGE, AGNHOST_START, |root| {
        fill_agnhost(binaries, root)?;
        with_libraries("nc.openbsd", "nc", root)?;
        // busybox's shell would run busybox's nc, and busybox's wget crashes with the other programs' C library.
        for name in ["conntrack", "dig", "getent", "sh", "ss", "wget"] {
            with_libraries(name, name, root)?;
        }
        fs::copy(binaries.find("coredns")?, root.join("coredns"))?;
        fs::create_dir(root.join("uploads"))?;
        // Makes the use of /etc/hosts independent of the C library's default.
        fs::create_dir_all(root.join("etc"))?;
        fs::write(root.join("etc/nsswitch.conf"), "hosts: files dns\n")?;
        // Specs retry themselves.
        fs::write(root.join("etc/wgetrc"), "tries = 1\n")?;
        // The certificate with which `agnhost porter` serves HTTPS.
        let keys = tempfile::tempdir()?;
        let serves = ["localhost".to_owned()];
        let subject = Subject { common_name: "localhost", organization: None, serves: &serves };
        Authority::new(keys.path())?.sign("localhost", &subject)?;
        for file in ["localhost.crt", "localhost.key"] {
            fs::copy(keys.path().join(file), root.join(file))?;
        }
        Ok(())
    })?;
    let regression = cached(&folder, REGRESSION_IMAGE, "ENTRYPOINT [\"/server\"]", |root| {
        fs::copy(binaries.find("regression-issue-74839")?, root.join("server"))?;
        Ok(())
    })?;
    Ok(vec![(TOOLS_IMAGE, tools), (REGRESSION_IMAGE, regression)])
}

/// agnhost, and a shell with the tools that test pods call.
fn fill_agnhost(binaries: &Binaries, root: &Path) -> Result<()> {
    fs::copy(binaries.find("agnhost")?, root.join("agnhost"))?;
    busybox(&root.join("bin"))?;
    with_libraries("curl", "curl", root)?;
    fs::create_dir(root.join("tmp"))?;
    Ok(fs::set_permissions(root.join("tmp"), fs::Permissions::from_mode(0o1777))?)
}

/// A program of this machine, as `/bin/NAME`, and its shared libraries.
fn with_libraries(program: &str, name: &str, root: &Path) -> Result<()> {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&paths).map(|folder| folder.join(program)).find(|path| path.is_file());
    let program = found.with_context(|| format!("{program} is missing: install it"))?;
    let copy = root.join("bin").join(name);
    // busybox may have this name, too: copying would overwrite busybox itself.
    if copy.is_symlink() {
        fs::remove_file(&copy)?;
    }
    fs::copy(&program, copy)?;
    for library in libraries(&output(Command::new("ldd").arg(&program), "ldd")?) {
        let copy = root.join(library.trim_start_matches('/'));
        fs::create_dir_all(copy.parent().context("the path of a library has no parent")?)?;
        fs::copy(library, copy).with_context(|| format!("copy {library}"))?;
    }
    Ok(())
}

/// The files that `ldd` names.
fn libraries(ldd: &str) -> Vec<&str> {
    ldd.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/'))).collect()
}

/// busybox, under each of its names.
fn busybox(directory: &Path) -> Result<()> {
    let program = ["/bin/busybox", "/usr/bin/busybox"].map(Path::new).into_iter().find(|path| path.exists());
    let program = program.context("/bin/busybox is missing: install the package busybox-static")?;
    fs::create_dir(directory)?;
    fs::copy(program, directory.join("busybox"))?;
    for name in output(Command::new(program).arg("--list"), "busybox --list")?.lines().filter(|name| *name != "busybox")
    {
        std::os::unix::fs::symlink("busybox", directory.join(name))?;
    }
    Ok(())
}

/// The archive of an image, created by `fill` unless it is cached.
fn cached(folder: &Path, image: &str, start: &str, fill: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let file = image.replace(['/', ':'], "_");
    let archive = folder.join(format!("{file}.tar"));
    if archive.exists() {
        return Ok(archive);
    }
    fs::create_dir_all(folder)?;
    say(format_args!("building the image {image}: once, into {}", folder.display()));
    // The caller has the cluster's lock, so an existing directory was left by a killed process.
    let context = folder.join(format!("{file}.unfinished"));
    let _ = fs::remove_dir_all(&context);
    let root = context.join("root");
    fs::create_dir_all(&root)?;
    fill(&root).with_context(|| format!("fill the image {image}"))?;
    let containerfile = context.join("Containerfile");
    fs::write(&containerfile, format!("FROM scratch\nCOPY root /\n{start}\n"))?;
    let unfinished = context.join("image.tar");
    build(&context, &containerfile, image, &unfinished)?;
    fs::rename(&unfinished, &archive).with_context(|| format!("move {} into place", archive.display()))?;
    fs::remove_dir_all(&context).with_context(|| format!("remove {}", context.display()))?;
    Ok(archive)
}

/// Builds an image from a Containerfile into an OCI archive, without using buildah's own store.
///
/// # Errors
/// buildah is missing or fails.
pub fn build(context: &Path, containerfile: &Path, image: &str, archive: &Path) -> Result<()> {
    let store = tempfile::tempdir_in(archive.parent().context("the path of the archive has no parent")?)?;
    let buildah = |arguments: &[&str]| {
        let mut command = Command::new("buildah");
        command.arg("--root").arg(store.path().join("root")).arg("--runroot").arg(store.path().join("run"));
        command.args(["--storage-driver", "vfs"]).args(arguments);
        command
    };
    let file = containerfile.to_str().context("the Containerfile's path is not UTF-8")?;
    let mut bud = buildah(&["build", "--isolation", "chroot", "--file", file, "--tag", image]);
    output(bud.arg(context), &format!("buildah build {image}"))?;
    output(&mut buildah(&["push", image, &format!("oci-archive:{}:{image}", archive.display())]), "buildah push")?;
    Ok(())
}

/// The archive of an image given as a file, or as a name in buildah's store, which is exported into `folder`.
pub(super) fn archive(image: &str, folder: &Path) -> Result<PathBuf> {
    let file = PathBuf::from(image);
    if file.is_file() {
        return Ok(file);
    }
    let archive = folder.join("image.tar");
    let target = format!("oci-archive:{}:{image}", archive.display());
    output(Command::new("buildah").args(["push", image, &target]), &format!("{image} is no file; buildah push"))?;
    ensure!(archive.is_file(), "buildah wrote no {}", archive.display());
    Ok(archive)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_what_ldd_found_and_the_loader() {
        let ldd = "\tlinux-vdso.so.1 (0x00007ffc)\n\
                   \tlibcurl.so.4 => /lib/x86_64-linux-gnu/libcurl.so.4 (0x00007f)\n\
                   \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        assert_eq!(libraries(ldd), ["/lib/x86_64-linux-gnu/libcurl.so.4", "/lib64/ld-linux-x86-64.so.2"]);
        assert!(libraries("\tnot a dynamic executable\n").is_empty());
    }
}
