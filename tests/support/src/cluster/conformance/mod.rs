//! Kubernetes' network e2e specs: selection, images, run and result.

mod report;
mod selection;

use super::binaries::Binaries;
use super::daemon::PAUSE_IMAGE;
use super::images::{self, REGRESSION_IMAGE, TOOLS_IMAGE};
use super::{Cluster, kubeconfig, say};
use crate::lab::output;
use anyhow::{Context, Result, ensure};
use regex::Regex;
use report::{Outcome, Progress};
use selection::Selection;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// Parallel specs per processor: they mostly wait.
const SPECS_PER_PROCESSOR: usize = 3;

/// Timeout of a run.
const TIMEOUT: &str = "2h";

/// Names the file with replacement registries. Unlike the flag, it is read before specs construct image names.
const REGISTRIES_OF_SUITE: &str = "KUBE_TEST_REPO_LIST";

/// The suite's registries, by their keys in that file. All are replaced by `localhost`.
const REGISTRIES: [&str; 9] = [
    "promoterE2eRegistry",
    "buildImageRegistry",
    "invalidRegistry",
    "gcEtcdRegistry",
    "gcRegistry",
    "sigStorageRegistry",
    "privateRegistry",
    "dockerLibraryRegistry",
    "cloudProviderGcpRegistry",
];

/// Kubernetes' test suite and the selected specs.
#[derive(Debug)]
pub struct Suite {
    binaries: Binaries,
    selection: Selection,
    /// Directory of log and report.
    directory: PathBuf,
    /// The file with the registries.
    registries: PathBuf,
}

impl Suite {
    /// Nodes required by its specs: one needs three, and some as many zones.
    pub const NODES: u8 = 3;

    /// Builds the missing parts of the suite for a version of Kubernetes, and selects the specs: all of the network
    /// group that `tests/conformance/left-out.yaml` does not exclude and that match `focus`. Log and report are written
    /// to `directory`.
    ///
    /// # Errors
    /// A build fails, an entry of the list excludes nothing, or `focus` matches nothing.
    pub fn new(release: &str, focus: Option<&Regex>, directory: &Path) -> Result<Self> {
        let binaries = Binaries::new(release)?;
        // The suite's processes have other working directories.
        let directory = std::path::absolute(directory)?;
        fs::create_dir_all(&directory).with_context(|| format!("make {}", directory.display()))?;
        let registries = directory.join("registries.yaml");
        fs::write(&registries, REGISTRIES.map(|name| format!("{name}: localhost\n")).concat())?;
        let list = output(Command::new(binaries.find("e2e.test")?).arg("--list-tests"), "e2e.test --list-tests")?;
        let specs = selection::specs(&list);
        ensure!(!specs.is_empty(), "e2e.test --list-tests names no spec of {}", selection::NETWORK);
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("conformance/left-out.yaml");
        let list = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
        let mut selection = Selection::new(specs, &list, release).with_context(|| file.display().to_string())?;
        if let Some(focus) = focus {
            selection.focus(focus)?;
        }
        say(format_args!("{} specs are run, {} left out", selection.chosen.len(), selection.left_out()));
        Ok(Self { binaries, selection, directory, registries })
    }

    /// Runs the selected specs in a cluster, and prints the result. Returns whether all passed.
    ///
    /// # Errors
    /// The suite cannot be run, or writes no report.
    pub fn run(&self, cluster: &Cluster) -> Result<bool> {
        self.load_images(cluster)?;
        cluster.route_pods()?;
        for node in cluster.spec().node_names()? {
            cluster.kubectl(&[
                "label",
                "--overwrite",
                "node",
                &node,
                &format!("topology.kubernetes.io/zone=of-{node}"),
            ])?;
        }
        let start = Instant::now();
        let report = self.directory.join("report.json");
        if report.exists() {
            fs::remove_file(&report)?;
        }
        let log = self.directory.join("log.txt");
        let good = self.run_ginkgo(cluster, &log)?;
        let text = fs::read_to_string(&report)
            .with_context(|| format!("ginkgo left no report; what it said is in {}", log.display()))?;
        let mut outcome = Outcome::new(&text, &self.selection.chosen)?;
        if !good && outcome.failed.is_empty() {
            outcome.failed.push(("the suite".to_owned(), "ginkgo failed and names no spec".to_owned()));
        }
        self.tell(&outcome);
        println!(
            "{} passed, {} failed, {} left out in {} s",
            outcome.passed,
            outcome.failed.len(),
            self.selection.left_out(),
            start.elapsed().as_secs()
        );
        if !outcome.failed.is_empty() {
            println!("log: {}", log.display());
        }
        Ok(outcome.failed.is_empty())
    }

    /// Loads the images on every node, under the suite's names for them.
    fn load_images(&self, cluster: &Cluster) -> Result<()> {
        let images = images::of_conformance(&self.binaries)?;
        let mut list = Command::new(self.binaries.find("e2e.test")?);
        list.arg("--list-images").env(REGISTRIES_OF_SUITE, &self.registries);
        let names = output(&mut list, "e2e.test --list-images")?;
        let nodes = cluster.spec().node_names()?;
        std::thread::scope(|scope| {
            let threads: Vec<_> = nodes
                .iter()
                .map(|node| {
                    scope.spawn(|| {
                        cluster.load_missing(node, &images)?;
                        let machine = cluster.machine(node)?;
                        let mut known = names.lines().filter_map(|name| Some((image_for(name)?, name)));
                        known.try_for_each(|(image, name)| machine.tag(image, name))
                    })
                })
                .collect();
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a thread panicked"))))
        })
    }

    /// Runs ginkgo, and prints a line for each completed spec; its output goes to the log. Returns whether it
    /// succeeded.
    fn run_ginkgo(&self, cluster: &Cluster, log: &Path) -> Result<bool> {
        let processors = std::thread::available_parallelism()?.get();
        let mut ginkgo = cluster.client(self.binaries.find("ginkgo")?)?;
        ginkgo
            .args(["--no-color", "-v", "--keep-going", "--timeout", TIMEOUT])
            .arg(format!("--procs={}", processors * SPECS_PER_PROCESSOR))
            .arg(format!("--focus={}", self.selection.expression()))
            .arg(format!("--output-dir={}", self.directory.display()))
            .arg("--json-report=report.json")
            .arg(self.binaries.find("e2e.test")?)
            .args(["--", "--provider=skeleton"])
            // Otherwise only the first of ginkgo's processes would count them.
            .arg(format!("--num-nodes={}", cluster.spec().nodes))
            .arg(format!("--kubeconfig={}", kubeconfig().display()))
            .arg(format!("--e2e-output-dir={}", self.directory.display()))
            .env(REGISTRIES_OF_SUITE, &self.registries);
        let mut file = File::create(log).with_context(|| format!("write {}", log.display()))?;
        let mut child = ginkgo
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(file.try_clone()?)
            .spawn()
            .context("start ginkgo")?;
        let mut progress = Progress::new(self.selection.chosen.len())?;
        let mut reader = BufReader::new(child.stdout.take().context("ginkgo has no output")?);
        let mut line = Vec::new();
        // The output of a spec need not be UTF-8.
        while reader.read_until(b'\n', &mut line)? > 0 {
            file.write_all(&line)?;
            if let Some(text) = progress.read(String::from_utf8_lossy(&line).trim_end()) {
                println!("{text}");
            }
            line.clear();
        }
        Ok(child.wait()?.success())
    }

    fn tell(&self, outcome: &Outcome) {
        println!("\n{:<50} {:>5} {:>6}", "group", "specs", "passed");
        for (group, count) in &outcome.groups {
            println!("{group:<50} {:>5} {:>6}", count.specs, count.passed);
        }
        println!("\nleft out");
        for reason in &self.selection.left_out {
            println!("{:>4}  {}", reason.specs, reason.text);
        }
        println!("\nlongest");
        for (time, name) in outcome.times.iter().take(5) {
            println!("{:>4} s  {name}", time.as_secs());
        }
        println!();
        for (name, why) in &outcome.failed {
            println!("FAILED  {name}: {why}");
        }
    }
}

/// Our replacement for one of the suite's images, if there is one.
fn image_for(name: &str) -> Option<&'static str> {
    let (_, file) = name.rsplit_once('/')?;
    match file.split_once(':')?.0 {
        "agnhost" | "busybox" | "distroless-iptables" | "glibc-dns-testing" | "jessie-dnsutils" => Some(TOOLS_IMAGE),
        "pause" => Some(PAUSE_IMAGE),
        "regression-issue-74839" => Some(REGRESSION_IMAGE),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_known_by_name_whatever_their_version() {
        for (name, image) in [
            ("localhost/agnhost:2.63.0", Some(TOOLS_IMAGE)),
            ("localhost/agnhost:2.55", Some(TOOLS_IMAGE)),
            ("localhost/pause:3.10.2", Some(PAUSE_IMAGE)),
            ("localhost/volume/nfs:1.6.0", None),
            ("localhost/nginx:1.15-4", None),
        ] {
            assert_eq!(image_for(name), image, "{name}");
        }
    }
}
