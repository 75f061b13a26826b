//! Mode `cluster-pool`: the block that the node's CiliumNode lists (`ipam` 2.2.11, decision 11).
//!
//! The operator gives a node its block by writing it there; people write there too, and a restored API server lists what
//! was true once. A block in use stays in use while anything holds an address of it, and is listed as long: whoever gives
//! blocks must see every one that pods have addresses of.

use crate::ip::overlaps;
use ipnet::{IpNet, Ipv4Net};
use std::net::Ipv4Addr;

/// Annotation of a CiliumNode: the block that its agent listed there itself, because pods have addresses of it. It is
/// written and taken away with the list, so that nobody need remember what was whose.
pub const CLAIM: &str = "cistern.io/claimed-pod-cidr";

/// The block that a node gives addresses from, with what must be remembered of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Served {
    /// The block, without host bits.
    pub block: Ipv4Net,
    /// No address of it is given any more, so that it can be left.
    pub leaving: bool,
    /// UID of the Node that the block was last listed for.
    pub node_uid: Option<String>,
    /// The block was listed for this node since the agent started. One that was not may be somebody else's by now: the
    /// machine may have been away for long.
    pub confirmed: bool,
}

/// What a CiliumNode says of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Listed<'a> {
    /// `spec.ipam.podCIDRs`
    pub pod_cidrs: &'a [String],
    /// The block that [`CLAIM`] names.
    pub claim: Option<Ipv4Net>,
    /// The operator refuses what is listed.
    pub refused: bool,
}

/// What is chosen from.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// Name of the node.
    pub node: &'a str,
    /// What is served now.
    pub served: Option<&'a Served>,
    /// Of the node's own CiliumNode, nothing where there is no such object; none before the API server has told.
    pub listed: Option<Listed<'a>>,
    /// Another CiliumNode lists the block that is served, or a part of it.
    pub taken: bool,
    /// UID of the Node; none while it is not known, or there is none.
    pub node_uid: Option<&'a str>,
    /// Something may hold an address of the block that is served.
    pub held: bool,
    /// Addresses that something holds outside of that block.
    pub beyond: &'a [Ipv4Addr],
}

/// A list of blocks to write, and with it [`CLAIM`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct List {
    /// `spec.ipam.podCIDRs`. What others wrote there stays, whatever it is.
    pub pod_cidrs: Vec<String>,
    /// The block that this node lists by itself.
    pub claim: Option<Ipv4Net>,
}

/// What to serve, and to list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// What to give addresses from; none when there is nothing yet, or when what was served is somebody else's by now.
    pub served: Option<Served>,
    /// What the CiliumNode has to say, once this is served; without a block to serve, once no address of the former one
    /// is given any more. None when it says so.
    pub list: Option<List>,
    /// What is waited for, or not as the CiliumNode says, with the fix.
    pub wait: Option<String>,
}

/// The IPv4 blocks of a list, without host bits, in their order. What cannot be read is the operator's to report.
pub fn ipv4_blocks(listed: &[String]) -> impl Iterator<Item = Ipv4Net> + '_ {
    listed.iter().filter_map(|text| text.parse::<Ipv4Net>().ok()).map(|net| net.trunc())
}

/// A list without a block.
fn without(listed: &[String], block: Ipv4Net) -> List {
    let is = |text: &String| text.parse::<Ipv4Net>().is_ok_and(|net| net.trunc() == block);
    List { pod_cidrs: listed.iter().filter(|text| !is(text)).cloned().collect(), claim: None }
}

/// A list that names a block first.
fn with(listed: &[String], block: Ipv4Net) -> List {
    let pod_cidrs = std::iter::once(block.to_string()).chain(listed.iter().cloned()).collect();
    List { pod_cidrs, claim: Some(block) }
}

/// Chooses between the block in use and what the CiliumNode lists.
#[must_use]
pub fn choose(input: &Input<'_>) -> Choice {
    let node = input.node;
    let Some(served) = input.served else { return first(input) };
    let as_it_is = Served { leaving: false, ..served.clone() };
    let Some(Listed { pod_cidrs, claim, refused }) = input.listed else {
        return Choice { served: Some(as_it_is), list: None, wait: None };
    };
    let blocks: Vec<Ipv4Net> = ipv4_blocks(pod_cidrs).collect();
    let block = served.block;
    let claim = claim.filter(|claim| blocks.contains(claim));
    let claimed = claim == Some(block);
    // What this node listed itself and does not serve any more has to go from there.
    let leftover = claim.filter(|claim| *claim != block);
    let others: Vec<Ipv4Net> =
        blocks.iter().copied().filter(|other| *other != block && Some(*other) != leftover).collect();
    if !blocks.contains(&block) {
        let Some(other) = others.first().copied().or(leftover) else {
            let of_another = !served.confirmed && is_of_another(served, input.node_uid);
            if !input.held && (served.leaving || input.taken || of_another) {
                return Choice { served: None, list: None, wait: Some(lost(block)) };
            }
            return Choice { served: Some(as_it_is), list: Some(with(pod_cidrs, block)), wait: None };
        };
        if input.held {
            let wait = Some(kept(node, block, other));
            return Choice { served: Some(as_it_is), list: Some(with(pod_cidrs, block)), wait };
        }
        return move_to(other, input);
    }
    let node_uid = input.node_uid.map(str::to_owned).or_else(|| served.node_uid.clone());
    let confirmed = Served { node_uid, confirmed: true, ..as_it_is };
    let Some(other) = others.first().copied() else {
        if !input.held && refused && (input.taken || claimed) {
            return Choice { served: None, list: Some(without(pod_cidrs, block)), wait: Some(lost(block)) };
        }
        let list = leftover.map(|leftover| without(pod_cidrs, leftover));
        return Choice { served: Some(confirmed), list, wait: None };
    };
    if input.held || (!claimed && blocks.first() == Some(&block)) {
        let list = leftover.map(|leftover| without(pod_cidrs, leftover));
        let wait = claimed.then(|| kept(node, block, other));
        return Choice { served: Some(confirmed), list, wait };
    }
    move_to(other, input)
}

/// Nothing is served yet. Of several blocks, the one that something holds an address of.
fn first(input: &Input<'_>) -> Choice {
    let blocks = || input.listed.into_iter().flat_map(|listed| ipv4_blocks(listed.pod_cidrs));
    let in_use = blocks().find(|block| input.beyond.iter().any(|address| block.contains(address)));
    match in_use.or_else(|| blocks().next()) {
        Some(block) => move_to(block, input),
        None => {
            let wait = format!(
                "required IPv4 PodCIDR not available: CiliumNode {:?} has no IPv4 prefix in spec.ipam.podCIDRs yet; in mode \
                 cluster-pool the operator writes it (see status.ipam.operator-status.error of the object, and whether an \
                 operator leads)",
                input.node
            );
            Choice { served: None, list: None, wait: Some(wait) }
        }
    }
}

fn move_to(block: Ipv4Net, input: &Input<'_>) -> Choice {
    let node_uid = input.node_uid.map(str::to_owned);
    Choice { served: Some(Served { block, leaving: false, node_uid, confirmed: true }), list: None, wait: None }
}

fn kept(node: &str, block: Ipv4Net, other: Ipv4Net) -> String {
    format!(
        "CiliumNode {node:?} lists {other}, but {block} is in use and stays so: pods keep their addresses, new ones come from \
         {block}, and it is listed, too. {other} is taken when nothing on this node holds an address any more: drain the \
         node to have it"
    )
}

fn lost(block: Ipv4Net) -> String {
    format!(
        "required IPv4 PodCIDR not available: {block}, which this node had, is another node's by now, and nothing on this \
         node holds an address of it; the operator gives another (see status.ipam.operator-status.error of the \
         CiliumNode, and whether an operator leads)"
    )
}

/// Chooses for `node` from what all CiliumNodes list, by name; none before the API server has told.
#[must_use]
pub fn choose_among<'a>(
    node: &str,
    served: Option<&Served>,
    lists: Option<impl Iterator<Item = (&'a str, Listed<'a>)>>,
    node_uid: Option<&str>,
    held: bool,
    beyond: &[Ipv4Addr],
) -> Choice {
    let block = served.map(|served| IpNet::V4(served.block));
    let is_taken =
        |listed| block.is_some_and(|block| ipv4_blocks(listed).any(|other| overlaps(&IpNet::V4(other), &block)));
    let Some(lists) = lists else {
        return choose(&Input { node, served, listed: None, taken: false, node_uid, held, beyond });
    };
    let (mut own, mut taken) = (Listed::default(), false);
    for (name, listed) in lists {
        if name == node {
            own = listed;
        } else {
            taken = taken || is_taken(listed.pod_cidrs);
        }
    }
    choose(&Input { node, served, listed: Some(own), taken, node_uid, held, beyond })
}

/// Whether a block was got for a Node that is another one than this.
fn is_of_another(served: &Served, node_uid: Option<&str>) -> bool {
    served.node_uid.as_deref().zip(node_uid).is_some_and(|(then, now)| then != now)
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

    fn served(block: &str) -> Served {
        Served { block: net(block), leaving: false, node_uid: Some("u1".into()), confirmed: true }
    }

    const A: &str = "10.33.0.0/26";
    const B: &str = "10.33.0.64/26";

    /// The block to serve, and the list to write with its claim.
    type Short = (Option<String>, Option<(Vec<String>, Option<String>)>);

    /// What node n1 sees, whose Node is u1.
    struct Seen<'a> {
        now: Option<&'a Served>,
        listed: &'a [&'a str],
        claim: Option<&'a str>,
        refused: bool,
        taken: bool,
        node_uid: Option<&'a str>,
    }

    const NOTHING: Seen<'static> =
        Seen { now: None, listed: &[], claim: None, refused: false, taken: false, node_uid: Some("u1") };

    impl Seen<'_> {
        fn choice(&self, held: bool) -> Choice {
            let pod_cidrs = texts(self.listed);
            let listed = Listed { pod_cidrs: &pod_cidrs, claim: self.claim.map(net), refused: self.refused };
            choose(&Input {
                node: "n1",
                served: self.now,
                listed: Some(listed),
                taken: self.taken,
                node_uid: self.node_uid,
                held,
                beyond: &[],
            })
        }

        fn short(&self, held: bool) -> Short {
            let Choice { served, list, .. } = self.choice(held);
            let list = list.map(|list| (list.pod_cidrs, list.claim.map(|claim| claim.to_string())));
            (served.map(|served| served.block.to_string()), list)
        }
    }

    fn is(block: &str) -> Short {
        (Some(block.to_owned()), None)
    }

    fn writes(block: &str, list: &[&str], claim: Option<&str>) -> Short {
        (Some(block.to_owned()), Some((texts(list), claim.map(str::to_owned))))
    }

    #[test]
    fn the_first_block_of_the_list_is_served() {
        let seen = Seen { listed: &["fd31::/112", A, B], ..NOTHING };
        assert_eq!(seen.choice(false), Choice { served: Some(served(A)), list: None, wait: None });
        let nothing = Seen { listed: &["fd31::/112", "10.33/16"], ..NOTHING }.choice(false);
        assert!(nothing.served.is_none() && nothing.wait.unwrap().contains("operator"));
        // Of two, the one that pods have addresses of: what was known of them was lost.
        let (pod_cidrs, beyond) = (texts(&[A, B]), ["10.33.0.70".parse().unwrap()]);
        let listed = Some(Listed { pod_cidrs: &pod_cidrs, ..Listed::default() });
        let input =
            Input { node: "n1", served: None, listed, taken: false, node_uid: None, held: false, beyond: &beyond };
        assert_eq!(choose(&input).served.unwrap().block, net(B));
        // Before the API server has told, what was known last is served.
        let unknown = Input { served: Some(&served(A)), listed: None, taken: true, ..input };
        assert_eq!(choose(&unknown), Choice { served: Some(served(A)), list: None, wait: None });
    }

    #[test]
    fn a_block_that_pods_have_addresses_of_is_kept_and_listed_beside_another() {
        let now = served(A);
        let seen = Seen { now: Some(&now), listed: &[B], ..NOTHING };
        assert_eq!(seen.short(true), writes(A, &[A, B], Some(A)));
        let wait = seen.choice(true).wait.unwrap();
        assert!(wait.contains(A) && wait.contains(B) && wait.contains("drain"), "{wait}");
        // So it stays, and nothing more is written.
        let claimed = Seen { listed: &[A, B], claim: Some(A), refused: true, ..seen };
        assert_eq!(claimed.short(true), is(A));
        assert!(claimed.choice(true).wait.is_some());
    }

    #[test]
    fn the_other_block_is_taken_when_nothing_is_held_and_the_first_goes_off_the_list() {
        let (a, b) = (served(A), served(B));
        let claimed = Seen { now: Some(&a), listed: &[A, B], claim: Some(A), refused: true, ..NOTHING };
        assert_eq!(claimed.short(false), is(B));
        assert_eq!(Seen { now: Some(&b), ..claimed }.short(true), writes(B, &[B], None));
        assert_eq!(Seen { now: Some(&b), listed: &[B], claim: Some(A), ..NOTHING }.short(true), is(B));
        // What was never listed by this node is nobody's to take off.
        assert_eq!(Seen { now: Some(&a), listed: &[B], ..NOTHING }.short(false), is(B));
        let turned = Seen { now: Some(&a), listed: &[B, A], ..NOTHING };
        assert_eq!((turned.short(false), turned.short(true)), (is(B), is(A)));
        // Two blocks that somebody gave a node: the first is served.
        assert_eq!(Seen { now: Some(&a), listed: &[A, B], ..NOTHING }.short(false), is(A));
    }

    #[test]
    fn a_list_without_a_block_gets_the_one_that_is_served() {
        let now = served(A);
        for (listed, wanted) in
            [(&[][..], &[A][..]), (&["fd31::/112"], &[A, "fd31::/112"]), (&["10.33/16"], &[A, "10.33/16"])]
        {
            assert_eq!(Seen { now: Some(&now), listed, ..NOTHING }.short(false), writes(A, wanted, Some(A)));
        }
        // Standing alone, it is written once.
        assert_eq!(Seen { now: Some(&now), listed: &[A], claim: Some(A), ..NOTHING }.short(false), is(A));
    }

    #[test]
    fn a_drained_node_gives_up_what_is_refused_to_it() {
        let now = served(A);
        let seen = Seen { now: Some(&now), listed: &[A], refused: true, taken: true, ..NOTHING };
        assert_eq!(seen.short(true), is(A));
        assert_eq!(seen.short(false), (None, Some((Vec::new(), None))));
        // Its own claim, too, though nobody lists it. What a person wrote there is for people to see.
        assert_eq!(Seen { taken: false, claim: Some(A), ..seen }.short(false), (None, Some((Vec::new(), None))));
        assert_eq!(Seen { taken: false, ..seen }.short(false), is(A));
        // The one that it belongs to keeps it.
        assert_eq!(Seen { refused: false, ..seen }.short(false), is(A));
        // Off the list, it is not claimed again.
        let leaving = Served { leaving: true, ..now.clone() };
        assert_eq!(Seen { now: Some(&leaving), listed: &[], taken: false, ..seen }.short(false), (None, None));
    }

    #[test]
    fn a_machine_that_comes_back_claims_nothing_that_is_not_its_own_any_more() {
        let before = Served { confirmed: false, ..served(A) };
        let seen = Seen { now: Some(&before), node_uid: Some("u2"), ..NOTHING };
        assert_eq!(seen.short(false), (None, None));
        assert!(seen.choice(false).wait.unwrap().contains(A));
        assert_eq!(Seen { taken: true, node_uid: Some("u1"), ..seen }.short(false), (None, None));
        // Pods that run keep it, whoever has it by now, and so does a node whose Node is not known.
        assert_eq!(Seen { taken: true, ..seen }.short(true), writes(A, &[A], Some(A)));
        assert_eq!(Seen { node_uid: None, ..seen }.short(false), writes(A, &[A], Some(A)));
        // An agent that has served it all the time claims it for its new Node.
        assert_eq!(Seen { now: Some(&served(A)), ..seen }.short(false), writes(A, &[A], Some(A)));
        // Listed again for the new Node, it is the new one's.
        let again = Seen { listed: &[A], ..seen }.choice(false).served.unwrap();
        assert_eq!(again.node_uid.as_deref(), Some("u2"));
    }

    #[test]
    fn attack_what_is_being_left_stays_so_before_the_api_server_has_told() {
        let leaving = Served { leaving: true, confirmed: false, ..served(A) };
        let input = Input {
            node: "n1",
            served: Some(&leaving),
            listed: None,
            taken: false,
            node_uid: None,
            held: false,
            beyond: &[],
        };
        assert!(choose(&input).served.unwrap().leaving);
    }

    #[test]
    fn attack_a_block_beside_which_pods_have_addresses_is_not_taken_off() {
        let (pod_cidrs, beyond) = (texts(&[B, A]), ["10.33.0.7".parse().unwrap()]);
        let listed = Some(Listed { pod_cidrs: &pod_cidrs, claim: Some(net(A)), refused: true });
        let now = served(B);
        let input = Input {
            node: "n1",
            served: Some(&now),
            listed,
            taken: false,
            node_uid: Some("u1"),
            held: false,
            beyond: &beyond,
        };
        assert_eq!(choose(&input).list, None);
    }
}
