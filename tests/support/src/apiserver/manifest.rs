//! Manifests: YAML text with one or more API objects.

use serde_json::Value;

/// An invalid manifest.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// The text is not YAML.
    #[error("the manifest is not YAML: {0}")]
    Syntax(#[from] serde_saphyr::Error),
    /// A document is not an API object.
    #[error("document {0} of the manifest has no apiVersion and kind")]
    NoKind(usize),
}

/// The objects of a manifest, in order; empty documents are skipped. Unquoted `yes`, `no`, `on` and `off` are booleans,
/// as for `kubectl`.
///
/// # Errors
/// The text is not YAML, or a document has no `apiVersion` and `kind`.
pub fn parse_manifest(text: &str) -> Result<Vec<Value>, ManifestError> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(text)?;
    let mut objects = Vec::new();
    for (index, document) in documents.into_iter().enumerate().filter(|(_, document)| !document.is_null()) {
        if document.get("apiVersion").is_none() || document.get("kind").is_none() {
            return Err(ManifestError::NoKind(index + 1));
        }
        objects.push(document);
    }
    Ok(objects)
}
