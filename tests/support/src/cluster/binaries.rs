//! Programs of Kubernetes: from the folder in `KUBEBUILDER_ASSETS`, from `PATH`, or built once from the Go modules
//! under `tests/kubernetes/` into a cache outside the tree.

use super::say;
use anyhow::{Context, Result, bail, ensure};
use regex::Regex;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// A program, and the module that contains it.
struct Program {
    name: &'static str,
    /// Folder under `tests/kubernetes/`; Kubernetes' own is followed by the release.
    module: &'static str,
    package: &'static str,
    /// Arguments that print its version. Without them it is always built: it goes into an image, and must be static.
    version: Option<&'static [&'static str]>,
}

const KUBERNETES: &str = "kubernetes";

const fn program(
    name: &'static str,
    module: &'static str,
    package: &'static str,
    version: Option<&'static [&'static str]>,
) -> Program {
    Program { name, module, package, version }
}

/// In the order in which they are built: those needed first come first.
const PROGRAMS: [Program; 13] = [
    program("etcd", "etcd", "go.etcd.io/etcd/server/v3", Some(&["--version"])),
    program("kube-apiserver", KUBERNETES, "k8s.io/kubernetes/cmd/kube-apiserver", Some(&["--version"])),
    program(
        "kube-controller-manager",
        KUBERNETES,
        "k8s.io/kubernetes/cmd/kube-controller-manager",
        Some(&["--version"]),
    ),
    program("kube-scheduler", KUBERNETES, "k8s.io/kubernetes/cmd/kube-scheduler", Some(&["--version"])),
    program("kubectl", KUBERNETES, "k8s.io/kubernetes/cmd/kubectl", Some(&["version", "--client"])),
    program("containerd", "containerd", "github.com/containerd/containerd/v2/cmd/containerd", Some(&["--version"])),
    program(
        "containerd-shim-runc-v2",
        "containerd",
        "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
        Some(&["-v"]),
    ),
    program("ctr", "containerd", "github.com/containerd/containerd/v2/cmd/ctr", Some(&["--version"])),
    program("kubelet", KUBERNETES, "k8s.io/kubernetes/cmd/kubelet", Some(&["--version"])),
    program("kube-proxy", KUBERNETES, "k8s.io/kubernetes/cmd/kube-proxy", Some(&["--version"])),
    program("helm", "helm", "helm.sh/helm/v3/cmd/helm", Some(&["version", "--short"])),
    program("agnhost", KUBERNETES, "k8s.io/kubernetes/test/images/agnhost", None),
    program("coredns", "coredns", "github.com/coredns/coredns", None),
];

/// Needed by the conformance run only: Kubernetes' test suite, its parallel runner, and a server of one spec.
const SUITE: [Program; 3] = [
    program("ginkgo", KUBERNETES, "github.com/onsi/ginkgo/v2/ginkgo", None),
    program("e2e.test", KUBERNETES, "k8s.io/kubernetes/test/e2e", Some(&["--version"])),
    program("regression-issue-74839", KUBERNETES, "k8s.io/kubernetes/test/images/regression-issue-74839", None),
];

/// Build tags that disable containerd's optional C libraries.
const TAGS: &str = "no_btrfs,no_devmapper,no_zfs";

/// A version's first three numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Version(u32, u32, u32);

impl Version {
    /// The first version in a text.
    fn find(text: &str) -> Option<Self> {
        let three = Regex::new(r"\bv?(\d+)\.(\d+)\.(\d+)").ok()?;
        let (_, numbers) = three.captures(text)?.extract::<3>();
        let [Ok(major), Ok(minor), Ok(patch)] = numbers.map(str::parse) else { return None };
        Some(Self(major, minor, patch))
    }

    /// Whether a program of this version can replace the pinned one. Kubernetes' own must have the same minor version;
    /// others the same major version and not be older.
    fn replaces(self, pinned: Self, module: &str) -> bool {
        if module == KUBERNETES {
            (self.0, self.1) == (pinned.0, pinned.1)
        } else {
            self.0 == pinned.0 && self.1 >= pinned.1
        }
    }
}

/// The programs for one release of Kubernetes.
#[derive(Debug, Clone)]
pub struct Binaries {
    release: String,
    modules: PathBuf,
    cache: PathBuf,
}

impl Binaries {
    /// The programs for a version such as `1.36`.
    ///
    /// # Errors
    /// Its module is not in the tree, or there is no cache directory.
    pub fn new(release: &str) -> Result<Self> {
        let modules = Path::new(env!("CARGO_MANIFEST_DIR")).join("kubernetes");
        let found = Self { release: release.to_owned(), modules, cache: cache()?.join("kubernetes") };
        if !found.module(KUBERNETES).is_dir() {
            bail!("Kubernetes {release}: expected one of {}", found.releases()?.join(", "));
        }
        Ok(found)
    }

    fn releases(&self) -> Result<Vec<String>> {
        let mut releases = Vec::new();
        for entry in fs::read_dir(&self.modules).with_context(|| format!("read {}", self.modules.display()))? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            releases.extend(name.strip_prefix("kubernetes-").map(str::to_owned));
        }
        releases.sort();
        Ok(releases)
    }

    /// The path of a program, which is built if necessary.
    ///
    /// # Errors
    /// The name is unknown, or the build fails.
    pub fn find(&self, name: &str) -> Result<PathBuf> {
        let program = PROGRAMS
            .iter()
            .chain(&SUITE)
            .find(|one| one.name == name)
            .with_context(|| format!("{name} is not a program of the cluster"))?;
        let pinned = self.pinned(program.module)?;
        if let Some(arguments) = program.version
            && let Some(path) = elsewhere(name, |path| {
                said_version(path, arguments).is_some_and(|found| found.replaces(pinned, program.module))
            })
        {
            return Ok(path);
        }
        self.cached(program, pinned)
    }

    /// Finds or builds every program of the cluster.
    ///
    /// # Errors
    /// As [`Binaries::find`].
    pub fn find_all(&self) -> Result<Vec<PathBuf>> {
        PROGRAMS.iter().map(|program| self.find(program.name)).collect()
    }

    /// Finds or builds all programs, and returns a `PATH` of their folders and the usual ones.
    ///
    /// # Errors
    /// As [`Binaries::find`], or a path is not visible on the cluster's machines.
    pub fn path(&self) -> Result<String> {
        let mut folders: Vec<PathBuf> = Vec::new();
        for path in self.find_all()? {
            let folder = path.parent().context("a program lies in no folder")?;
            for hidden in ["/run", "/var/lib", "/var/log"] {
                ensure!(!folder.starts_with(hidden), "{}: each machine has a {hidden} of its own", path.display());
            }
            if !folders.iter().any(|known| known == folder) {
                folders.push(folder.to_owned());
            }
        }
        folders
            .extend(["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(PathBuf::from));
        std::env::join_paths(folders)?.into_string().ok().context("a folder's name is not UTF-8")
    }

    /// The cache folder for the pinned version of a module: its programs, and images with them.
    pub(super) fn folder(&self, module: &str) -> Result<PathBuf> {
        let Version(major, minor, patch) = self.pinned(module)?;
        Ok(self.cache.join(format!("{module}@v{major}.{minor}.{patch}")))
    }

    fn module(&self, module: &str) -> PathBuf {
        let folder = if module == KUBERNETES { format!("{module}-{}", self.release) } else { module.to_owned() };
        self.modules.join(folder)
    }

    fn pinned(&self, module: &str) -> Result<Version> {
        let path = self.module(module).join("go.mod");
        let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        let package = PROGRAMS.iter().find(|program| program.module == module).map_or("", |program| program.package);
        required(&text, package).with_context(|| format!("{}: no version of {package}", path.display()))
    }

    fn cached(&self, program: &Program, version: Version) -> Result<PathBuf> {
        let folder = self.folder(program.module)?;
        let path = folder.join(program.name);
        if path.exists() {
            return Ok(path);
        }
        fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
        let Version(major, minor, patch) = version;
        let name = program.name;
        say(format_args!("building {name} v{major}.{minor}.{patch}: once, into {}", folder.display()));
        let start = Instant::now();
        let unfinished = folder.join(format!("{name}.unfinished"));
        let mut flags = "-s -w".to_owned();
        if program.module == KUBERNETES {
            let variables = "k8s.io/component-base/version";
            flags.push_str(&format!(
                " -X {variables}.gitVersion=v{major}.{minor}.{patch} -X {variables}.gitMajor={major} -X {variables}.gitMinor={minor}"
            ));
        }
        let status = Command::new("go")
            .current_dir(self.module(program.module))
            .args(if name.ends_with(".test") { &["test", "-c"][..] } else { &["build"] })
            .args(["-trimpath", "-tags", TAGS, "-ldflags", &flags, "-o"])
            .arg(&unfinished)
            .arg(program.package)
            .env("CGO_ENABLED", "0")
            .env("GOWORK", "off")
            .env("GOFLAGS", "-mod=readonly")
            .status()
            .with_context(|| {
                format!(
                    "{name} is neither in the folder that KUBEBUILDER_ASSETS names nor in PATH in the right version, and \
                     there is no `go` to build it: install Go (the release that {}/go.mod names, or newer)",
                    self.module(program.module).display()
                )
            })?;
        ensure!(status.success(), "go build of {name} ended with {status}");
        fs::rename(&unfinished, &path).with_context(|| format!("move {name} into place"))?;
        say(format_args!("built {name} in {} s", start.elapsed().as_secs()));
        Ok(path)
    }
}

/// The directory of built programs and images: `cistern/` in the user's cache.
///
/// # Errors
/// The environment has neither a cache directory nor a home directory.
pub(super) fn cache() -> Result<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
    Ok(cache.context("neither XDG_CACHE_HOME nor HOME is set: expected a place for built programs")?.join("cistern"))
}

/// A program in the user's environment, if its version is suitable.
fn elsewhere(name: &str, good: impl Fn(&Path) -> bool) -> Option<PathBuf> {
    let assets = std::env::var_os("KUBEBUILDER_ASSETS").map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = assets.into_iter().chain(std::env::split_paths(&path));
    folders.map(|folder| folder.join(name)).find(|candidate| candidate.is_file() && good(candidate))
}

fn said_version(program: &Path, arguments: &[&str]) -> Option<Version> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output().ok()?;
    Version::find(&String::from_utf8_lossy(&output.stdout))
}

/// The version that a `go.mod` requires of the module that has `package`.
fn required(text: &str, package: &str) -> Option<Version> {
    let words =
        |line: &str| line.trim_start_matches("require ").split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    text.lines().map(words).find_map(|words| match words.as_slice() {
        [module, version, ..] if version.starts_with('v') && package.starts_with(module.as_str()) => {
            Version::find(version)
        }
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_parsed_from_the_programs_output() {
        for (said, version) in [
            ("Kubernetes v1.36.3\n", Version(1, 36, 3)),
            ("Client Version: v1.32.4-dispatcher\nKustomize Version: v5.5.0", Version(1, 32, 4)),
            ("containerd github.com/containerd/containerd/v2 v2.2.9 abc", Version(2, 2, 9)),
            ("etcd Version: 3.6.16\nGit SHA: x", Version(3, 6, 16)),
            ("v3.22.0+g1a500d5", Version(3, 22, 0)),
        ] {
            assert_eq!(Version::find(said), Some(version), "{said}");
        }
        assert_eq!(Version::find("unknown"), None);
    }

    #[test]
    fn kubernetes_must_have_the_same_minor_version_and_others_not_be_older() {
        let pinned = Version(1, 36, 3);
        assert!(Version(1, 36, 0).replaces(pinned, KUBERNETES));
        assert!(!Version(1, 37, 0).replaces(pinned, KUBERNETES));
        assert!(!Version(1, 34, 9).replaces(pinned, KUBERNETES));
        let pinned = Version(2, 2, 9);
        assert!(Version(2, 3, 0).replaces(pinned, "containerd"));
        assert!(!Version(2, 1, 9).replaces(pinned, "containerd"));
        assert!(!Version(3, 0, 0).replaces(pinned, "containerd"));
    }

    #[test]
    fn every_program_has_a_version_in_its_module() {
        let binaries = Binaries::new("1.36").unwrap();
        for release in binaries.releases().unwrap() {
            let binaries = Binaries::new(&release).unwrap();
            for program in PROGRAMS.iter().chain(&SUITE) {
                binaries.pinned(program.module).unwrap_or_else(|error| panic!("{}: {error:#}", program.name));
            }
            let Version(major, minor, _) = binaries.pinned(KUBERNETES).unwrap();
            assert_eq!(format!("{major}.{minor}"), release);
        }
        let unknown = Binaries::new("1.2").unwrap_err().to_string();
        assert!(unknown.contains("1.34") && unknown.contains("1.36"), "{unknown}");
    }

    #[test]
    fn a_requirement_is_found_in_and_outside_of_a_block() {
        let text = "module x\nrequire example.org/a v1.2.3\nrequire (\n\texample.org/b/v2 v2.0.1 // indirect\n)\n";
        assert_eq!(required(text, "example.org/a/cmd/a"), Some(Version(1, 2, 3)));
        assert_eq!(required(text, "example.org/b/v2/cmd/b"), Some(Version(2, 0, 1)));
        assert_eq!(required(text, "example.org/c"), None);
    }
}
