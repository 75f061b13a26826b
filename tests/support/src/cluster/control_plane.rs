//! A kube-apiserver and its etcd without nodes or namespaces, on ports of the loopback device. For tests of Cistern
//! against the real API server.

use super::binaries::Binaries;
use super::install;
use super::pki::{Authority, Subject, kubeconfig};
use super::question;
use crate::apiserver::{Account, Database, Upstream};
use crate::lab::output;
use anyhow::{Context, Result, ensure};
use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Namespace of the chart.
const NAMESPACE: &str = "kube-system";

/// Lifetime of the service accounts' tokens: longer than any run.
const TOKENS_LAST: &str = "24h";

/// The kinds of the chart's objects that are installed: no workloads, because there are no nodes.
const INSTALLED: [&str; 6] =
    ["CustomResourceDefinition", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"];

/// Runs a command until the end of its input, which the kernel closes when the parent terminates. A signal to the
/// process group stops it, too; otherwise kube-apiserver would wait for a terminated etcd.
const UNTIL_END_OF_INPUT: &str = r#"trap : HUP INT TERM; "$@" & child=$!; read -r _; kill -9 "$child"; wait"#;

const ETCD: &str = "etcd";
const KUBE_APISERVER: &str = "kube-apiserver";

/// Minimum by which the resource version decreases when a backup is restored. The rest of a cluster writes, too: a
/// version from after the backup is not reused soon.
const LOST_REVISIONS: u32 = 1_000;

/// A key outside kube-apiserver's prefix, and its value, base64-encoded for etcd's JSON gateway.
const OTHER_WRITE: &str = r#"{"key": "cmVzdA==", "value": "cmVzdA=="}"#;

/// A running control plane. It is stopped when dropped, or with this process.
pub struct ControlPlane {
    /// In the order of their start.
    daemons: Mutex<Vec<Daemon>>,
    binaries: Binaries,
    folder: tempfile::TempDir,
    /// Client URL of etcd.
    etcd: String,
    /// Port of kube-apiserver.
    port: u16,
    /// The chart's values for which permissions are installed.
    values: Mutex<Option<Vec<String>>>,
}

/// One of its programs.
struct Daemon {
    name: &'static str,
    arguments: Vec<String>,
    process: Child,
}

impl ControlPlane {
    /// Starts both for a version such as `1.36`, and waits until they are ready.
    ///
    /// # Errors
    /// A program is not available, or does not become ready.
    pub fn start(release: &str) -> Result<Self> {
        let binaries = Binaries::new(release)?;
        let folder = tempfile::Builder::new().prefix("cistern-control-plane-").tempdir()?;
        let [client, peer, port] = free_ports()?;
        let (clients, peers) = (format!("http://127.0.0.1:{client}"), format!("http://127.0.0.1:{peer}"));
        let this =
            Self { daemons: Mutex::default(), binaries, folder, etcd: clients.clone(), port, values: Mutex::default() };
        this.spawn(
            ETCD,
            vec![
                format!("--data-dir={}", this.path("etcd").display()),
                "--unsafe-no-fsync".to_owned(),
                format!("--listen-client-urls={clients}"),
                format!("--advertise-client-urls={clients}"),
                format!("--listen-peer-urls={peers}"),
                format!("--initial-advertise-peer-urls={peers}"),
                format!("--initial-cluster=default={peers}"),
            ],
        )?;
        let pki = this.path("pki");
        let authority = Authority::new(&pki)?;
        authority.token_keys("tokens")?;
        let administrator = Subject { common_name: "admin", organization: Some(install::MASTERS), serves: &[] };
        authority.sign("admin", &administrator)?;
        let serves = [Ipv4Addr::LOCALHOST.to_string()];
        let subject = Subject { common_name: "kube-apiserver", organization: None, serves: &serves };
        authority.sign("apiserver", &subject)?;
        fs::write(this.path("admin.conf"), kubeconfig(&this.url(), &pki, "admin"))?;
        let pki = pki.display();
        this.spawn(
            KUBE_APISERVER,
            vec![
                format!("--etcd-servers={clients}"),
                "--bind-address=127.0.0.1".to_owned(),
                format!("--secure-port={port}"),
                "--endpoint-reconciler-type=none".to_owned(),
                format!("--service-cluster-ip-range={}", super::SERVICE_NETWORK),
                "--authorization-mode=Node,RBAC".to_owned(),
                "--enable-admission-plugins=NodeRestriction".to_owned(),
                format!("--client-ca-file={pki}/ca.crt"),
                format!("--tls-cert-file={pki}/apiserver.crt"),
                format!("--tls-private-key-file={pki}/apiserver.key"),
                "--service-account-issuer=https://kubernetes.default.svc.cluster.local".to_owned(),
                format!("--service-account-key-file={pki}/tokens.pub"),
                format!("--service-account-signing-key-file={pki}/tokens.key"),
            ],
        )?;
        this.wait()?;
        Ok(this)
    }

    fn wait(&self) -> Result<()> {
        let ready = super::wait_for("kube-apiserver to be ready", || {
            Ok(self.get("/readyz").is_ok() && self.get(&format!("/api/v1/namespaces/{NAMESPACE}")).is_ok())
        });
        ready.with_context(|| self.last_words(KUBE_APISERVER))
    }

    /// Installs the chart's service accounts and their permissions for these values (`KEY=VALUE`, as for `helm --set`),
    /// and the kinds of its objects. No-op if they are installed already.
    ///
    /// # Errors
    /// The chart rejects the values, or the API server the objects.
    pub fn install(&self, values: &[String]) -> Result<()> {
        let mut installed_values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        if installed_values.as_deref() == Some(values) {
            return Ok(());
        }
        let mut helm = Command::new(self.binaries.find("helm")?);
        helm.args(["template", "cistern"]).arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/cistern"));
        let version = self.version()?;
        helm.args(["--namespace", NAMESPACE, "--include-crds", "--kube-version", &version]);
        for value in values {
            helm.args(["--set", value]);
        }
        let rendered = output(&mut helm, "helm template cistern")?;
        let kind = |document: &str| document.lines().find_map(|line| line.strip_prefix("kind: ")).map(str::to_owned);
        let installed = |document: &&str| kind(document).is_some_and(|kind| INSTALLED.contains(&kind.as_str()));
        let manifests: Vec<&str> = rendered.split("\n---\n").filter(installed).collect();
        let path = self.path("chart.yaml");
        fs::write(&path, manifests.join("\n---\n"))?;
        let path = path.display().to_string();
        self.kubectl(&["apply", "--server-side", "--force-conflicts", "--filename", &path])?;
        self.kubectl(&["wait", "--for=condition=Established", "crd", "--all", "--timeout=30s"])?;
        *installed_values = Some(values.to_vec());
        Ok(())
    }

    /// Makes the next [`Self::install`] reinstall, because the objects were changed.
    pub fn distrust_installation(&self) {
        *self.values.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Connects as an administrator and as each of the chart's service accounts, which must be installed.
    ///
    /// # Errors
    /// A token is rejected.
    pub fn connect(self: &Arc<Self>) -> Result<Upstream> {
        let administrator = fs::read_to_string(self.path("admin.conf"))?;
        let mut kubeconfigs = vec![(Account::Administrator, administrator)];
        for (account, name) in [(Account::Agent, "cistern"), (Account::Operator, "cistern-operator")] {
            let duration = format!("--duration={TOKENS_LAST}");
            let token = self.kubectl(&["create", "token", name, "--namespace", NAMESPACE, &duration])?;
            kubeconfigs.push((account, self.token_kubeconfig(token.trim())));
        }
        Upstream::new(&kubeconfigs, Arc::clone(self) as Arc<dyn Database>)
    }

    fn token_kubeconfig(&self, token: &str) -> String {
        let (server, authority) = (self.url(), self.path("pki/ca.crt"));
        let config = serde_json::json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "cistern", "cluster": {"server": server, "certificate-authority": authority}}],
            "users": [{"name": "account", "user": {"token": token}}],
            "contexts": [{"name": "cistern", "context": {"cluster": "cistern", "user": "account"}}],
            "current-context": "cistern",
        });
        config.to_string()
    }

    /// The version of kube-apiserver.
    ///
    /// # Errors
    /// No answer.
    pub fn version(&self) -> Result<String> {
        let version: serde_json::Value = serde_json::from_str(&self.get("/version")?)?;
        Ok(version.get("gitVersion").and_then(serde_json::Value::as_str).unwrap_or_default().to_owned())
    }

    /// kube-apiserver's answer at a path, as administrator.
    fn get(&self, path: &str) -> Result<String> {
        question::text(&self.path("admin.conf"), None, path)
    }

    fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        let mut kubectl = Command::new(self.binaries.find("kubectl")?);
        kubectl.arg("--kubeconfig").arg(self.path("admin.conf")).args(arguments);
        output(&mut kubectl, &format!("kubectl {}", arguments.join(" ")))
    }

    fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn daemons(&self) -> MutexGuard<'_, Vec<Daemon>> {
        self.daemons.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn spawn(&self, name: &'static str, arguments: Vec<String>) -> Result<()> {
        let process = self.process(name, &arguments)?;
        self.daemons().push(Daemon { name, arguments, process });
        Ok(())
    }

    fn process(&self, name: &str, arguments: &[String]) -> Result<Child> {
        let log = File::options().create(true).append(true).open(self.path(&format!("{name}.log")))?;
        let mut command = Command::new("sh");
        command.args(["-c", UNTIL_END_OF_INPUT, "sh"]).arg(self.binaries.find(name)?).args(arguments);
        command.current_dir(self.folder.path()).stdin(Stdio::piped()).stdout(log.try_clone()?).stderr(log);
        command.spawn().with_context(|| format!("start {name}"))
    }

    /// Stops programs, runs a task, and starts them again.
    fn without(&self, names: &[&str], task: impl FnOnce() -> Result<()>) -> Result<()> {
        {
            let mut daemons = self.daemons();
            let meant = |daemon: &&mut Daemon| names.contains(&daemon.name);
            daemons.iter_mut().rev().filter(meant).for_each(Daemon::end);
            task()?;
            for daemon in daemons.iter_mut().filter(meant) {
                daemon.process = self.process(daemon.name, &daemon.arguments)?;
            }
        }
        self.wait()
    }

    /// Increases the version, as writes of the rest of a cluster do.
    fn skip_revisions(&self) -> Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let client = kube::Client::try_from(kube::Config::new(self.etcd.parse()?))?;
            for _ in 0..LOST_REVISIONS {
                let put = http::Request::post("/v3/kv/put")
                    .body(kube::client::Body::from(OTHER_WRITE.as_bytes().to_vec()))?;
                let status = client.send(put).await?.status();
                ensure!(status.is_success(), "etcd refuses a write: {status}");
            }
            Ok(())
        })
    }

    fn last_words(&self, name: &str) -> String {
        let text = fs::read_to_string(self.path(&format!("{name}.log"))).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        let last = lines.get(lines.len().saturating_sub(20)..).unwrap_or_default();
        format!("the last lines of {name} are\n{}", last.join("\n"))
    }
}

impl Database for ControlPlane {
    fn back_up(&self, to: &Path) -> Result<()> {
        // etcd's data is complete on disk when it is stopped.
        self.without(&[ETCD], || copy(&self.path(ETCD), to))?;
        self.skip_revisions()
    }

    fn restore(&self, from: &Path) -> Result<()> {
        // kube-apiserver must lose its watch cache, too, as the documentation of a restore requires.
        self.without(&[KUBE_APISERVER, ETCD], || {
            fs::remove_dir_all(self.path(ETCD))?;
            copy(from, &self.path(ETCD))
        })
    }
}

/// Copies a folder recursively; the target must not exist.
fn copy(from: &Path, to: &Path) -> Result<()> {
    let mut cp = Command::new("cp");
    cp.args(["--recursive", "--sparse=always", "--no-target-directory"]).arg(from).arg(to);
    output(&mut cp, &format!("cp {} {}", from.display(), to.display())).map(drop)
}

impl Daemon {
    fn end(&mut self) {
        drop(self.process.stdin.take());
        // Errors cannot be reported here.
        let _ = self.process.wait();
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        self.daemons().iter_mut().rev().for_each(Daemon::end);
    }
}

/// Three ports that were free a moment ago.
fn free_ports() -> Result<[u16; 3]> {
    let listeners = [(); 3].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)));
    let mut ports = [0; 3];
    for (port, listener) in ports.iter_mut().zip(&listeners) {
        *port = listener.as_ref().map_err(|error| anyhow::anyhow!("a free port: {error}"))?.local_addr()?.port();
    }
    Ok(ports)
}
