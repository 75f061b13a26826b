//! Dependencies between our packages, and the external dependencies of the pure one.

use crate::workspace::{Dependency, Package};

/// One of our packages, and those that it may depend on. Dev-dependencies are not limited.
struct Allowed {
    package: &'static str,
    ours: &'static [&'static str],
}

const ALLOWED: [Allowed; 7] = [
    Allowed { package: "cistern", ours: &["cistern-core", "cistern-crds", "cistern-ebpf-common"] },
    Allowed { package: "cistern-core", ours: &["cistern-ebpf-common"] },
    Allowed { package: "cistern-crds", ours: &[] },
    Allowed { package: "cistern-ebpf", ours: &["cistern-ebpf-common"] },
    Allowed { package: "cistern-ebpf-common", ours: &[] },
    Allowed { package: "cistern-tests", ours: &["cistern", "cistern-core", "cistern-crds", "cistern-ebpf-common"] },
    Allowed { package: "xtask", ours: &[] },
];

/// The package without I/O, and the crates it may use, none of which does any.
const PURE: &str = "cistern-core";
const PURE_MAY_USE: [&str; 8] =
    ["bytes", "ipnet", "jiff", "serde", "serde-saphyr", "serde_json", "strsim", "thiserror"];

/// All dependencies in the wrong direction.
pub(super) fn violations(packages: &[Package]) -> Vec<String> {
    let mut found = Vec::new();
    for package in packages {
        let Some(allowed) = ALLOWED.iter().find(|allowed| allowed.package == package.name) else {
            found.push(format!("the package {} has no place in the layers", package.name));
            continue;
        };
        for dependency in package.dependencies.iter().filter(|dependency| is_built_in(dependency)) {
            let name = dependency.name.as_str();
            let is_ours = dependency.source.is_none();
            if is_ours && !allowed.ours.contains(&name) {
                found.push(format!("{} depends on {name}, which is not below it", package.name));
            }
            if !is_ours && package.name == PURE && !PURE_MAY_USE.contains(&name) {
                let may = PURE_MAY_USE.join(", ");
                found.push(format!("{PURE} depends on {name}; to stay without I/O it may use {may}"));
            }
        }
    }
    found
}

fn is_built_in(dependency: &Dependency) -> bool {
    dependency.kind.as_deref() != Some("dev")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, dependencies: &[(&str, Option<&str>, bool)]) -> Package {
        let dependencies = dependencies
            .iter()
            .map(|(name, kind, ours)| Dependency {
                name: (*name).to_owned(),
                kind: kind.map(str::to_owned),
                source: (!ours).then(|| "registry".to_owned()),
            })
            .collect();
        Package { name: name.to_owned(), dependencies, targets: Vec::new() }
    }

    #[test]
    fn dependencies_in_the_right_direction_pass() {
        let packages = [
            package("cistern", &[("cistern-core", None, true), ("tokio", None, false)]),
            package("cistern-core", &[("ipnet", None, false), ("proptest", Some("dev"), false)]),
            package("cistern-ebpf", &[("cistern-ebpf-common", None, true)]),
        ];
        assert_eq!(violations(&packages), [] as [&str; 0]);
    }

    #[test]
    fn dependencies_in_the_wrong_direction_or_with_io_are_reported() {
        for (name, dependency, ours) in [
            ("cistern-core", "cistern", true),
            ("cistern-core", "tokio", false),
            ("cistern-crds", "cistern-core", true),
            ("cistern-ebpf-common", "cistern-core", true),
            ("cistern", "cistern-tests", true),
            ("cistern-common", "serde", false),
        ] {
            let found = violations(&[package(name, &[(dependency, None, ours)])]);
            assert_eq!(found.len(), 1, "{name} -> {dependency}: {found:?}");
        }
        let build = package("cistern-core", &[("cc", Some("build"), false)]);
        assert_eq!(violations(&[build]).len(), 1);
    }
}
