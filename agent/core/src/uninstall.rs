//! Protocol between an uninstall and the agents: a request in an annotation of each CiliumNode, and the agent's answer
//! in another.
//!
//! The request is a text that is unique each time. An agent that finds one without an answer to it removes everything
//! of Cistern from its node. Its answer is the text of the request, followed by what could not be removed.

/// Annotation with the request.
pub const REQUEST: &str = "cistern.io/uninstall";
/// Annotation with the answer.
pub const ANSWER: &str = "cistern.io/uninstalled";

/// An agent's reply to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// None yet.
    None,
    /// Everything was removed from the node.
    Done,
    /// What could not be removed.
    Failed(String),
}

/// The text of an answer.
#[must_use]
pub fn answer(request: &str, failures: &[String]) -> String {
    if failures.is_empty() { request.to_owned() } else { format!("{request}: {}", failures.join("; ")) }
}

/// The reply in an answer. An answer to an earlier request is no reply to this one.
#[must_use]
pub fn reply(request: &str, answer: Option<&str>) -> Reply {
    match answer.and_then(|answer| answer.strip_prefix(request)) {
        Some("") => Reply::Done,
        Some(rest) => rest.strip_prefix(": ").map_or(Reply::None, |failure| Reply::Failed(failure.to_owned())),
        None => Reply::None,
    }
}

/// The request that an agent has to carry out, if any.
#[must_use]
pub fn pending<'a>(request: Option<&'a str>, answer: Option<&str>) -> Option<&'a str> {
    request.filter(|request| !request.is_empty() && reply(request, answer) == Reply::None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_to_its_own_request_alone() {
        assert_eq!(pending(None, None), None);
        assert_eq!(pending(Some(""), None), None);
        assert_eq!(pending(Some("b2"), Some("a1")), Some("b2"));
        let done = answer("b2", &[]);
        assert_eq!(reply("b2", Some(&done)), Reply::Done);
        assert_eq!(pending(Some("b2"), Some(&done)), None);
        let failed = answer("b2", &["routes: no".to_owned(), "pins: busy".to_owned()]);
        assert_eq!(reply("b2", Some(&failed)), Reply::Failed("routes: no; pins: busy".to_owned()));
        assert_eq!(pending(Some("b2"), Some(&failed)), None, "it is not retried");
        assert_eq!(reply("b", Some(&done)), Reply::None);
    }
}
