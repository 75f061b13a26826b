//! The operator's verdict on the pod CIDRs of a node, as it travels on the CiliumNode.
//!
//! A verdict is a [`Code`] for programs, the list of pod CIDRs that was judged, and a text for administrators. The operator
//! writes the annotation [`ANNOTATION`] first and the same text to `status.ipam.operator-status.error` second; when it
//! withdraws a refusal, it clears the text first and removes the annotation second. An agent acts on a verdict only while all
//! of these hold ([`Standing::read`]):
//!
//! * the judged list is what `spec.ipam.podCIDRs` lists now: a verdict on an earlier list says nothing about this one;
//! * the status shows the verdict's text: an operator that does not know the annotation has not replaced the text since;
//! * this build knows the code and may read the format.
//!
//! A text without annotation is read by `legacy_verdicts` if the release before wrote it, and is
//! otherwise shown and acted on by no program: Cilium's operator writes its own.

use super::legacy_verdicts;
use crate::format::Version;
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// Annotation of a CiliumNode that holds the operator's verdict as JSON.
///
/// An annotation and no field: the schema of Cilium's own CRD prunes fields that it does not know.
pub const ANNOTATION: &str = "cistern.io/ipam-verdict";

/// What this build writes: its reader is needed to understand it.
const VERSION: Version = Version::new(1, 1);

/// A longer list is not repeated in the annotation (all annotations of an object have 256 KiB together); a verdict without
/// judged list is shown and never acted on.
const LONGEST_LIST: usize = 8 * 1024;

macro_rules! codes {
    ($($variant:ident $name:literal $refusal:literal $help:literal;)+) => {
        /// What was decided about a list of pod CIDRs. The names are stable: they are read from annotations of other builds.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Code {
            $(#[doc = $help] $variant,)+
        }

        impl Code {
            /// Every code, for tests and documentation.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// The name in annotations and metric labels.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),+ }
            }

            /// Whether the node may not have what it lists. Otherwise the verdict says why it got nothing more, or what is odd.
            #[must_use]
            pub const fn is_refusal(self) -> bool {
                match self { $(Self::$variant => $refusal),+ }
            }

            /// What it means, human-readable.
            #[must_use]
            pub const fn help(self) -> &'static str {
                match self { $(Self::$variant => $help),+ }
            }

            /// The code of this name; none for a code of another build.
            #[must_use]
            pub fn from_name(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|code| code.name() == name)
            }
        }
    };
}

codes! {
    InvalidCidr "InvalidCIDR" true
        "An element of the list is not a CIDR";
    Conflict "Conflict" true
        "The node lists a pod CIDR other than those recorded for it";
    OutOfRange "OutOfRange" true
        "A listed pod CIDR lies outside the pool";
    NotAligned "NotAligned" true
        "A listed pod CIDR is not exactly one aligned pod CIDR of the pool";
    Overlapping "Overlapping" true
        "Two pod CIDRs of the list overlap";
    AlreadyAllocated "AlreadyAllocated" true
        "A listed pod CIDR, or a part of it, belongs to another node";
    InQuarantine "InQuarantine" true
        "A listed pod CIDR was another node's a short while ago";
    NoPool "NoPool" true
        "No pool is configured for the family of a listed pod CIDR";
    OutsidePool "OutsidePool" false
        "The node keeps a pod CIDR of the pool as it was configured before";
    NotSettled "NotSettled" false
        "Nodes have not had the time to list the pod CIDRs they have; nothing new is allocated meanwhile";
    PoolExhausted "PoolExhausted" false
        "The pool has no free pod CIDR";
    RecordsFull "RecordsFull" false
        "The object that records the pool's pod CIDRs has no room for another node";
}

/// A verdict on what a node lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// What was decided, for programs.
    pub code: Code,
    /// The element of the list that it is about, where it is about one.
    pub cidr: Option<IpNet>,
    /// What was decided and what to do, human-readable.
    pub text: String,
}

impl Verdict {
    /// Whether the verdict says that the node may not have this pod CIDR.
    #[must_use]
    pub fn refuses(&self, cidr: IpNet) -> bool {
        self.code.is_refusal() && self.cidr == Some(cidr)
    }

    /// The annotation for a node that lists `pod_cidrs`.
    #[must_use]
    pub fn annotation(&self, pod_cidrs: &[String]) -> String {
        let judged = (pod_cidrs.iter().map(String::len).sum::<usize>() <= LONGEST_LIST).then(|| pod_cidrs.to_vec());
        let document = Document {
            version: VERSION,
            code: self.code.name().to_owned(),
            cidr: self.cidr,
            judged,
            text: self.text.clone(),
        };
        // Every field has a JSON form.
        serde_json::to_string(&document).unwrap_or_default()
    }
}

/// The annotation's JSON. A newer build may add fields.
#[derive(Debug, Serialize, Deserialize)]
struct Document {
    #[serde(flatten)]
    version: Version,
    code: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cidr: Option<IpNet>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    judged: Option<Vec<String>>,
    text: String,
}

/// What a CiliumNode says of the operator's verdict.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Standing {
    /// The verdict on what the node lists now.
    pub verdict: Option<Verdict>,
    /// The list is refused, or an earlier one was and the operator has not judged this one yet. No reason to release anything;
    /// one to claim what is kept.
    pub is_contested: bool,
}

impl Standing {
    /// Reads what one version of an object says: the value of [`ANNOTATION`], `spec.ipam.podCIDRs` and
    /// `status.ipam.operator-status.error`.
    #[must_use]
    pub fn read(annotation: Option<&str>, pod_cidrs: &[String], error: Option<&str>) -> Self {
        let error = error.unwrap_or_default();
        let (verdict, is_current) = match annotation {
            None => (legacy_verdicts::read(error), true),
            Some(annotation) => match parse(annotation) {
                None => (None, false),
                Some((judged, verdict)) => {
                    let is_current = judged.as_deref() == Some(pod_cidrs) && verdict.text == error;
                    (Some(verdict), is_current)
                }
            },
        };
        let is_contested = verdict.as_ref().is_some_and(|verdict| verdict.code.is_refusal());
        Self { verdict: verdict.filter(|_| is_current), is_contested }
    }

    /// The verdict on what the node lists now, if it is a refusal.
    #[must_use]
    pub fn refusal(&self) -> Option<&Verdict> {
        self.verdict.as_ref().filter(|verdict| verdict.code.is_refusal())
    }
}

/// The judged list and the verdict of an annotation; none of a format or with a code that this build does not know.
fn parse(annotation: &str) -> Option<(Option<Vec<String>>, Verdict)> {
    let document: Document = serde_json::from_str(annotation).ok()?;
    document.version.check(VERSION.format).ok()?;
    let code = Code::from_name(&document.code)?;
    Some((document.judged, Verdict { code, cidr: document.cidr, text: document.text }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict() -> Verdict {
        let cidr = "10.0.1.0/24".parse().ok();
        Verdict { code: Code::AlreadyAllocated, cidr, text: "10.0.1.0/24 belongs to n2".to_owned() }
    }

    fn in_force(annotation: Option<&str>, pod_cidrs: &[String], error: Option<&str>) -> Option<Verdict> {
        Standing::read(annotation, pod_cidrs, error).verdict
    }

    fn list(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn a_verdict_is_in_force_for_the_list_that_was_judged_while_the_status_shows_it() {
        let (verdict, listed) = (verdict(), list(&["10.0.1.0/24", "fd00::/64"]));
        let annotation = verdict.annotation(&listed);
        let now = |listed: &[String], error| in_force(Some(&annotation), listed, error);
        let text = Some(verdict.text.as_str());
        assert_eq!(now(&listed, text), Some(verdict.clone()));
        assert!(verdict.refuses("10.0.1.0/24".parse().unwrap()) && !verdict.refuses("110.0.1.0/24".parse().unwrap()));
        // Another list: changed, reordered, emptied.
        for other in [list(&["10.0.1.0/24"]), list(&["fd00::/64", "10.0.1.0/24"]), Vec::new()] {
            assert_eq!(now(&other, text), None, "{other:?}");
            assert!(Standing::read(Some(&annotation), &other, text).is_contested);
        }
        // Another text: an operator of another build judged since, or this one is about to write it or has cleared it.
        for error in [None, Some(""), Some("node has CIDRs allocated that conflict"), Some("something of Cilium's")] {
            assert_eq!(now(&listed, error), None, "{error:?}");
        }
    }

    #[test]
    fn annotations_of_other_builds_are_read_when_they_allow_it() {
        let listed = list(&["10.0.1.0/24"]);
        let read = |json: &str| in_force(Some(json), &listed, Some("t")).map(|verdict| verdict.code);
        let later =
            r#"{"format":7,"oldest_reader":1,"code":"Conflict","judged":["10.0.1.0/24"],"text":"t","more":{"x":1}}"#;
        assert_eq!(read(later), Some(Code::Conflict));
        assert_eq!(read(&later.replace(r#""oldest_reader":1"#, r#""oldest_reader":7"#)), None);
        assert_eq!(read(&later.replace("Conflict", "OfAnotherBuild")), None);
        assert_eq!(read("{"), None);
        assert_eq!(read(""), None);
        // Without what was judged it is shown alone; so is a list that is too long to be repeated.
        assert_eq!(read(r#"{"format":1,"oldest_reader":1,"code":"Conflict","text":"t"}"#), None);
        let long = list(&["10.0.1.0/24"; 1000]);
        let annotation = verdict().annotation(&long);
        assert!(annotation.len() < 1000);
        assert_eq!(in_force(Some(&annotation), &long, Some(&verdict().text)), None);
    }

    #[test]
    fn a_text_without_annotation_is_acted_on_if_the_release_before_wrote_it() {
        let error = "requested CIDR 10.0.1.0/24 is already allocated: 10.0.1.0/24 belongs to n2";
        let read = in_force(None, &list(&["10.0.1.0/24"]), Some(error)).unwrap();
        assert_eq!((read.code, read.cidr, read.text.as_str()), (Code::AlreadyAllocated, verdict().cidr, error));
        assert_eq!(in_force(None, &[], Some("allocation failed: 10.0.1.0/24 is already allocated")), None);
        assert_eq!(in_force(None, &[], None), None);
        // An annotation that cannot be read is a verdict of another build, and its text is that build's, too.
        assert_eq!(in_force(Some("{}"), &[], Some(error)), None);
    }

    #[test]
    fn codes_have_distinct_stable_names() {
        let names: Vec<&str> = Code::ALL.iter().map(|code| code.name()).collect();
        assert_eq!(
            names,
            [
                "InvalidCIDR",
                "Conflict",
                "OutOfRange",
                "NotAligned",
                "Overlapping",
                "AlreadyAllocated",
                "InQuarantine",
                "NoPool",
                "OutsidePool",
                "NotSettled",
                "PoolExhausted",
                "RecordsFull",
            ]
        );
        assert!(Code::ALL.iter().all(|code| Code::from_name(code.name()) == Some(*code)));
    }
}
