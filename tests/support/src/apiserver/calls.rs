//! The record of clients' calls, for write budgets and for comparison with the chart's RBAC rules.

use std::fmt;

use jiff::Timestamp;

use super::patch::PatchKind;

/// A verb as RBAC rules name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "the names are those of RBAC")]
pub enum Verb {
    Get,
    List,
    Watch,
    Create,
    Update,
    Patch,
    Delete,
    DeleteCollection,
}

impl Verb {
    /// All verbs.
    pub const ALL: [Self; 8] = [
        Self::Get,
        Self::List,
        Self::Watch,
        Self::Create,
        Self::Update,
        Self::Patch,
        Self::Delete,
        Self::DeleteCollection,
    ];

    /// The verb's name in RBAC rules.
    pub fn name(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::List => "list",
            Self::Watch => "watch",
            Self::Create => "create",
            Self::Update => "update",
            Self::Patch => "patch",
            Self::Delete => "delete",
            Self::DeleteCollection => "deletecollection",
        }
    }

    /// Whether the verb is for changes.
    pub fn is_write(self) -> bool {
        !matches!(self, Self::Get | Self::List | Self::Watch)
    }
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One call to a resource. Discovery and health are not recorded.
#[derive(Clone, Debug)]
pub struct Call {
    /// When it arrived, on the server's clock.
    pub at: Timestamp,
    /// The caller: the name given to `ApiServer::client_as`, or over HTTP the `User-Agent` up to its first slash.
    pub client: String,
    /// The verb.
    pub verb: Verb,
    /// API group; empty for the core group.
    pub group: String,
    /// Plural name of the resource.
    pub resource: String,
    /// `status`, or empty.
    pub subresource: String,
    /// Empty for cluster-scoped resources and for lists of all namespaces.
    pub namespace: String,
    /// Empty for lists, watches and creates with a generated name.
    pub name: String,
    /// The field manager of a write.
    pub manager: String,
    /// `merge`, `json`, `strategic` or `apply`; empty for other verbs.
    pub patch: &'static str,
    /// The HTTP status that the client got, or 0 if the connection was reset.
    pub code: u16,
    /// Whether the call changed anything. A write without a difference changes nothing.
    pub changed: bool,
}

impl fmt::Display for Call {
    /// `12:00:03 operator patch ciliumnodes/status node-1 (manager cistern-ipam, apply) -> 200`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {} {}", self.at.strftime("%H:%M:%S"), self.client, self.verb, self.resource)?;
        if !self.subresource.is_empty() {
            write!(f, "/{}", self.subresource)?;
        }
        if !self.name.is_empty() {
            let slash = if self.namespace.is_empty() { "" } else { "/" };
            write!(f, " {}{slash}{}", self.namespace, self.name)?;
        }
        if self.verb.is_write() {
            write!(f, " (manager {}", self.manager)?;
            if !self.patch.is_empty() {
                write!(f, ", {}", self.patch)?;
            }
            f.write_str(if self.changed { ", changed)" } else { ")" })?;
        }
        write!(f, " -> {}", self.code)
    }
}

/// The name of a patch format in a [`Call`].
pub(super) fn patch_name(kind: Option<PatchKind>) -> &'static str {
    match kind {
        None => "",
        Some(PatchKind::Merge) => "merge",
        Some(PatchKind::Json) => "json",
        Some(PatchKind::Strategic) => "strategic",
        Some(PatchKind::Apply) => "apply",
    }
}
