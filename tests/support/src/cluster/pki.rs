//! Certificates, keys and kubeconfigs.

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PublicKeyData, date_time_ymd,
};
use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// A certificate authority and the folder of the certificates it signed: `NAME.crt` and `NAME.key`.
pub(super) struct Authority {
    directory: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

/// Subject of a certificate.
pub(super) struct Subject<'a> {
    /// The user, for Kubernetes.
    pub(super) common_name: &'a str,
    /// The group, for Kubernetes.
    pub(super) organization: Option<&'a str>,
    /// Its DNS names and IP addresses.
    pub(super) serves: &'a [String],
}

impl Authority {
    /// Creates one: `ca.crt`, without a key on disk, since nothing is signed later.
    pub(super) fn new(directory: &Path) -> Result<Self> {
        fs::create_dir_all(directory)?;
        let mut parameters = parameters(&Subject { common_name: "cistern-cluster", organization: None, serves: &[] })?;
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate()?;
        let certificate = parameters.self_signed(&key)?;
        write_pem(&directory.join("ca.crt"), "CERTIFICATE", certificate.der())?;
        Ok(Self { directory: directory.to_owned(), issuer: Issuer::new(parameters, key) })
    }

    /// Creates a key and a certificate.
    pub(super) fn sign(&self, name: &str, subject: &Subject<'_>) -> Result<()> {
        let mut parameters = parameters(subject)?;
        parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        parameters.extended_key_usages = vec![if subject.serves.is_empty() {
            ExtendedKeyUsagePurpose::ClientAuth
        } else {
            ExtendedKeyUsagePurpose::ServerAuth
        }];
        let key = KeyPair::generate()?;
        let certificate = parameters.signed_by(&key, &self.issuer).with_context(|| format!("sign {name}"))?;
        write_pem(&self.directory.join(format!("{name}.crt")), "CERTIFICATE", certificate.der())?;
        write_pem(&self.directory.join(format!("{name}.key")), "PRIVATE KEY", &key.serialize_der())
    }

    /// Creates the key pair for service account tokens: `NAME.key` and `NAME.pub`.
    pub(super) fn token_keys(&self, name: &str) -> Result<()> {
        let key = KeyPair::generate()?;
        write_pem(&self.directory.join(format!("{name}.key")), "PRIVATE KEY", &key.serialize_der())?;
        write_pem(&self.directory.join(format!("{name}.pub")), "PUBLIC KEY", &key.subject_public_key_info())
    }
}

fn parameters(subject: &Subject<'_>) -> Result<CertificateParams> {
    let mut parameters = CertificateParams::new(subject.serves)?;
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, subject.common_name);
    if let Some(organization) = subject.organization {
        name.push(DnType::OrganizationName, organization);
    }
    parameters.distinguished_name = name;
    parameters.not_before = date_time_ymd(2020, 1, 1);
    parameters.not_after = date_time_ymd(2049, 12, 31);
    parameters.use_authority_key_identifier_extension = true;
    Ok(parameters)
}

fn write_pem(path: &Path, tag: &str, bytes: &[u8]) -> Result<()> {
    let text = pem::encode(&pem::Pem::new(tag, bytes));
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = options.open(path).with_context(|| format!("write {}", path.display()))?;
    std::io::Write::write_all(&mut file, text.as_bytes())?;
    Ok(())
}

/// A kubeconfig that names `NAME.crt`, `NAME.key` and `ca.crt` in a folder.
pub(super) fn kubeconfig(server: &str, directory: &Path, name: &str) -> String {
    let directory = directory.display();
    format!(
        "apiVersion: v1\n\
         kind: Config\n\
         clusters:\n\
         - name: cistern\n\
         \x20 cluster: {{server: \"{server}\", certificate-authority: \"{directory}/ca.crt\"}}\n\
         users:\n\
         - name: {name}\n\
         \x20 user: {{client-certificate: \"{directory}/{name}.crt\", client-key: \"{directory}/{name}.key\"}}\n\
         contexts:\n\
         - name: cistern\n\
         \x20 context: {{cluster: cistern, user: {name}}}\n\
         current-context: cistern\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_private_and_in_pem() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::new(directory.path()).unwrap();
        let serves = ["172.30.0.10".to_owned(), "kubernetes".to_owned()];
        authority.sign("server", &Subject { common_name: "server", organization: None, serves: &serves }).unwrap();
        authority.token_keys("tokens").unwrap();
        for (name, tag) in [
            ("ca.crt", "CERTIFICATE"),
            ("server.crt", "CERTIFICATE"),
            ("server.key", "PRIVATE KEY"),
            ("tokens.key", "PRIVATE KEY"),
            ("tokens.pub", "PUBLIC KEY"),
        ] {
            let path = directory.path().join(name);
            assert_eq!(pem::parse(fs::read(&path).unwrap()).unwrap().tag(), tag, "{name}");
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600, "{name}");
        }
        assert!(!directory.path().join("ca.key").exists());
    }
}
