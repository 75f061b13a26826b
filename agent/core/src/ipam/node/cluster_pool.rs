//! Mode `cluster-pool`: the block that the node's CiliumNode lists (`ipam` 2.2.11, decision 11).
//!
//! The operator gives a node its block by writing it there; people write there too, and a restored API server lists what
//! was true once. A block in use stays in use while anything holds an address of it, and is listed as long: whoever gives
//! blocks must see every one that pods have addresses of.

use crate::ip::overlaps;
use ipnet::{IpNet, Ipv4Net};

/// The block that a node gives addresses from, with what must be remembered of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Served {
    /// The block, without host bits.
    pub block: Ipv4Net,
    /// A block that this node wrote into its CiliumNode itself: the one that it serves, beside what others wrote there, or
    /// one that it served before, which is taken off the list again.
    pub claim: Option<Ipv4Net>,
    /// UID of the Node that the block was last listed for.
    pub node_uid: Option<String>,
    /// The block was listed for this node since the agent started. One that was not may be somebody else's by now: the
    /// machine may have been away for long.
    pub confirmed: bool,
}

/// What is chosen from.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// Name of the node.
    pub node: &'a str,
    /// What is served now.
    pub served: Option<&'a Served>,
    /// `spec.ipam.podCIDRs` of the node's own CiliumNode, empty where there is no such object; none before the API server
    /// has told.
    pub listed: Option<&'a [String]>,
    /// Another CiliumNode lists the block that is served, or a part of it.
    pub taken: bool,
    /// UID of the Node; none while it is not known, or there is none.
    pub node_uid: Option<&'a str>,
    /// Something may hold an address of the block that is served.
    pub held: bool,
}

/// What to serve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// What to give addresses from; none when there is nothing yet, or when what was served is somebody else's by now.
    pub served: Option<Served>,
    /// What is waited for, or not as the CiliumNode says, with the fix.
    pub wait: Option<String>,
}

/// The IPv4 blocks of a list, without host bits, in their order. What cannot be read is the operator's to report.
pub fn ipv4_blocks(listed: &[String]) -> impl Iterator<Item = Ipv4Net> + '_ {
    listed.iter().filter_map(|text| text.parse::<Ipv4Net>().ok()).map(|net| net.trunc())
}

/// Chooses between the block in use and what the CiliumNode lists.
#[must_use]
pub fn choose(input: &Input<'_>) -> Choice {
    let node = input.node;
    let Some(served) = input.served else {
        let first = input.listed.and_then(|listed| ipv4_blocks(listed).next());
        let wait = first.is_none().then(|| {
            format!(
                "required IPv4 PodCIDR not available: CiliumNode {node:?} has no IPv4 prefix in spec.ipam.podCIDRs yet; in \
                 mode cluster-pool the operator writes it (see status.ipam.operator-status.error of the object, and \
                 whether an operator leads)"
            )
        });
        let node_uid = input.node_uid.map(str::to_owned);
        return Choice { served: first.map(|block| Served { block, claim: None, node_uid, confirmed: true }), wait };
    };
    let Some(listed) = input.listed else { return Choice { served: Some(served.clone()), wait: None } };
    let blocks: Vec<Ipv4Net> = ipv4_blocks(listed).collect();
    let block = served.block;
    let is_listed = blocks.contains(&block);
    let node_uid = if is_listed {
        input.node_uid.map(str::to_owned).or_else(|| served.node_uid.clone())
    } else {
        served.node_uid.clone()
    };
    let confirmed = is_listed || served.confirmed;
    // What this node listed itself and does not serve any more has to go from there.
    let leftover = served.claim.filter(|claim| *claim != block && blocks.contains(claim));
    let claimed = served.claim == Some(block);
    let others = || blocks.iter().copied().filter(|other| *other != block && Some(*other) != leftover);
    let Some(other) = others().next() else {
        if blocks.is_empty() && !input.held && (input.taken || !confirmed && is_of_another(served, input.node_uid)) {
            let wait = format!(
                "required IPv4 PodCIDR not available: {block}, which this node had, is not listed for it any more, {}, and \
                 nothing on this node holds an address of it; the operator gives another",
                if input.taken { "another node lists it" } else { "its Node is another one by now" }
            );
            return Choice { served: None, wait: Some(wait) };
        }
        // With nothing beside it, it is the block of this node and no claim.
        let claim = leftover.or((!is_listed).then_some(block));
        return Choice { served: Some(Served { block, claim, node_uid, confirmed }), wait: None };
    };
    let keep = |claim, wait| Choice { served: Some(Served { block, claim, node_uid, confirmed }), wait };
    if is_listed && !claimed && (input.held || blocks.first() == Some(&block)) {
        return keep(leftover, None);
    }
    if input.held {
        let wait = format!(
            "CiliumNode {node:?} lists {}, but {block} is in use and stays so: pods keep their addresses, new ones come from \
             {block}, and it is listed, too. {other} is taken when nothing on this node holds an address any more: drain \
             the node to have it",
            others().map(|other| other.to_string()).collect::<Vec<_>>().join(", ")
        );
        return keep(Some(block), Some(wait));
    }
    let claim = claimed.then_some(block).or(leftover);
    let node_uid = input.node_uid.map(str::to_owned);
    Choice { served: Some(Served { block: other, claim, node_uid, confirmed: true }), wait: None }
}

/// Chooses for `node` from what all CiliumNodes list, by name; none before the API server has told.
#[must_use]
pub fn choose_among<'a>(
    node: &str,
    served: Option<&Served>,
    lists: Option<impl Iterator<Item = (&'a str, &'a [String])>>,
    node_uid: Option<&str>,
    held: bool,
) -> Choice {
    let block = served.map(|served| IpNet::V4(served.block));
    let is_taken =
        |listed| block.is_some_and(|block| ipv4_blocks(listed).any(|other| overlaps(&IpNet::V4(other), &block)));
    let Some(lists) = lists else {
        return choose(&Input { node, served, listed: None, taken: false, node_uid, held });
    };
    let (mut own, mut taken) = (&[][..], false);
    for (name, listed) in lists {
        if name == node {
            own = listed;
        } else {
            taken = taken || is_taken(listed);
        }
    }
    choose(&Input { node, served, listed: Some(own), taken, node_uid, held })
}

/// Whether a block was got for a Node that is another one than this.
fn is_of_another(served: &Served, node_uid: Option<&str>) -> bool {
    served.node_uid.as_deref().zip(node_uid).is_some_and(|(then, now)| then != now)
}

/// What `spec.ipam.podCIDRs` has to become so that it lists what is served; none when it does. What others wrote there
/// stays, whatever it is.
#[must_use]
pub fn list(listed: &[String], served: &Served) -> Option<Vec<String>> {
    let claim = served.claim?;
    let is = |text: &String, block: Ipv4Net| text.parse::<Ipv4Net>().is_ok_and(|net| net.trunc() == block);
    let contains = |block| listed.iter().any(|text| is(text, block));
    if claim == served.block {
        return (!contains(claim)).then(|| std::iter::once(claim.to_string()).chain(listed.iter().cloned()).collect());
    }
    // Never the last one: an empty list asks for another block.
    (contains(claim) && contains(served.block))
        .then(|| listed.iter().filter(|text| !is(text, claim)).cloned().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(text: &str) -> Ipv4Net {
        text.parse().unwrap()
    }

    fn texts(list: &[&str]) -> Vec<String> {
        list.iter().map(|text| (*text).to_owned()).collect()
    }

    fn served(block: &str, claim: Option<&str>) -> Served {
        Served { block: net(block), claim: claim.map(net), node_uid: Some("u1".into()), confirmed: true }
    }

    const A: &str = "10.33.0.0/26";
    const B: &str = "10.33.0.64/26";

    /// Of node n1, whose Node is u1.
    fn chosen(now: Option<&Served>, listed: &[&str], held: bool) -> Choice {
        let listed = texts(listed);
        let input = Input { node: "n1", served: now, listed: Some(&listed), taken: false, node_uid: Some("u1"), held };
        choose(&input)
    }

    #[test]
    fn the_first_block_of_the_list_is_served() {
        assert_eq!(chosen(None, &["fd31::/112", A, B], false), Choice { served: Some(served(A, None)), wait: None });
        let nothing = chosen(None, &["fd31::/112", "10.33/16"], false);
        assert!(nothing.served.is_none() && nothing.wait.unwrap().contains("operator"));
        // Before the API server has told, what was known last is served.
        let unknown = Input {
            node: "n1",
            served: Some(&served(A, None)),
            listed: None,
            taken: true,
            node_uid: None,
            held: false,
        };
        assert_eq!(choose(&unknown), Choice { served: Some(served(A, None)), wait: None });
    }

    #[test]
    fn a_block_that_pods_have_addresses_of_is_kept_and_listed_beside_another() {
        let kept = chosen(Some(&served(A, None)), &[B], true);
        let wait = kept.wait.unwrap();
        assert!(wait.contains(A) && wait.contains(B) && wait.contains("drain"), "{wait}");
        assert_eq!(kept.served, Some(served(A, Some(A))));
        assert_eq!(list(&texts(&[B]), &served(A, Some(A))), Some(texts(&[A, B])));
        // So it stays, also after a restart, and nothing more is written.
        assert_eq!(chosen(Some(&served(A, Some(A))), &[A, B], true).served, Some(served(A, Some(A))));
        assert_eq!(list(&texts(&[A, B]), &served(A, Some(A))), None);
    }

    #[test]
    fn the_other_block_is_taken_when_nothing_is_held_and_the_first_goes_off_the_list() {
        let moved = chosen(Some(&served(A, Some(A))), &[A, B], false);
        assert_eq!(moved, Choice { served: Some(served(B, Some(A))), wait: None });
        assert_eq!(list(&texts(&[A, B]), &served(B, Some(A))), Some(texts(&[B])));
        assert_eq!(chosen(Some(&served(B, Some(A))), &[A, B], true).served, Some(served(B, Some(A))));
        assert_eq!(chosen(Some(&served(B, Some(A))), &[B], true).served, Some(served(B, None)));
        // What was never listed by this node is nobody's to take off.
        let followed = chosen(Some(&served(A, None)), &[B], false);
        assert_eq!(followed, Choice { served: Some(served(B, None)), wait: None });
        assert_eq!(chosen(Some(&served(A, None)), &[B, A], false).served, Some(served(B, None)));
        assert_eq!(chosen(Some(&served(A, None)), &[B, A], true).served, Some(served(A, None)));
        // Two blocks that somebody gave a node: the first is served.
        assert_eq!(chosen(Some(&served(A, None)), &[A, B], false).served, Some(served(A, None)));
    }

    #[test]
    fn a_claim_that_stands_alone_is_the_nodes_block() {
        assert_eq!(chosen(Some(&served(A, Some(A))), &[A], true).served, Some(served(A, None)));
    }

    #[test]
    fn a_list_without_a_block_gets_the_one_that_is_served() {
        for listed in [&[][..], &["fd31::/112"], &["10.33/16"]] {
            let kept = chosen(Some(&served(A, None)), listed, false);
            assert_eq!(kept, Choice { served: Some(served(A, Some(A))), wait: None });
            let mut wanted = texts(&[A]);
            wanted.extend(texts(listed));
            assert_eq!(list(&texts(listed), &served(A, Some(A))), Some(wanted));
        }
        // The last block is never taken off.
        assert_eq!(list(&texts(&[A]), &served(B, Some(A))), None);
    }

    #[test]
    fn a_machine_that_comes_back_claims_nothing_that_is_not_its_own_any_more() {
        let before = Served { confirmed: false, ..served(A, None) };
        let input = Input {
            node: "n1",
            served: Some(&before),
            listed: Some(&[]),
            taken: false,
            node_uid: Some("u2"),
            held: false,
        };
        let lost = choose(&input);
        assert!(lost.served.is_none() && lost.wait.unwrap().contains(A));
        let lost = choose(&Input { taken: true, node_uid: Some("u1"), ..input });
        assert!(lost.served.is_none() && lost.wait.unwrap().contains("another node"));
        // Pods that run keep it, whoever has it by now, and so does a node whose Node is not known.
        let claimed = Some(Served { confirmed: false, ..served(A, Some(A)) });
        assert_eq!(choose(&Input { taken: true, held: true, ..input }).served, claimed);
        assert_eq!(choose(&Input { node_uid: None, ..input }).served, claimed);
        // An agent that has served it all the time claims it for its new Node.
        let live = choose(&Input { served: Some(&served(A, None)), ..input }).served.unwrap();
        assert_eq!(live.claim, Some(net(A)));
        // Listed again for the new Node, it is the new one's.
        let listed = texts(&[A]);
        let again = choose(&Input { listed: Some(&listed), ..input }).served.unwrap();
        assert_eq!(again.node_uid.as_deref(), Some("u2"));
    }
}

#[cfg(test)]
mod attack {
    use super::*;

    #[test]
    fn a_drained_node_gives_up_a_block_that_another_node_lists_too() {
        let a: Ipv4Net = "10.33.0.0/26".parse().unwrap();
        let served = Served { block: a, claim: Some(a), node_uid: Some("u1".into()), confirmed: true };
        let listed = [a.to_string()];
        let input = Input {
            node: "a",
            served: Some(&served),
            listed: Some(&listed),
            taken: true,
            node_uid: Some("u2"),
            held: false,
        };
        let choice = choose(&input);
        assert_eq!(choice.served, None, "kept, and nothing is waited for: {:?}", choice.wait);
    }
}
