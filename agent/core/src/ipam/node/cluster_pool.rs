//! Mode `cluster-pool`: the block that the node's CiliumNode lists (`ipam` 2.2.11, decision 11).
//!
//! The operator gives a node its block by writing it there; people write there too, and a restored API server lists what
//! was true once. A block in use stays in use while anything holds an address of it, and is listed as long: whoever gives
//! blocks must see every one that pods have addresses of.

use crate::ip::overlaps;
use crate::ipam::verdict::{Code, Verdict};
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
    /// The operator's verdict on what is listed, if it is a refusal.
    pub refusal: Option<&'a Verdict>,
    /// The operator refuses what is listed, or refused an earlier list and has not judged this one yet.
    pub is_contested: bool,
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
    /// Another CiliumNode lists the block that is served, or a part of it. Of no matter while it is held.
    pub taken: bool,
    /// UID of the Node; none while it is not known, or there is none.
    pub node_uid: Option<&'a str>,
    /// Something may hold an address of the block that is served.
    pub held: bool,
    /// Addresses that something holds outside of that block; none before the leases are read.
    pub beyond: Option<&'a [Ipv4Addr]>,
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
    // What is being left may have gone off the list already, and be another node's.
    let Some(Listed { pod_cidrs, claim, refusal, is_contested }) = input.listed else {
        return Choice { served: Some(served.clone()), list: None, wait: None };
    };
    let as_it_is = Served { leaving: false, ..served.clone() };
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
    let is_held =
        |leftover: &Ipv4Net| input.beyond.is_none_or(|beyond| beyond.iter().any(|held| leftover.contains(held)));
    let list = || {
        // What is served in its place was refused with it: it is claimed, for the operator to accept.
        let claim = is_contested.then_some(block);
        leftover.filter(|leftover| !is_held(leftover)).map(|leftover| List { claim, ..without(pod_cidrs, leftover) })
    };
    let Some(other) = others.first().copied() else {
        // What this node listed by itself, and was not given another block instead of, is accepted once it is heard of.
        let is_refused = refusal.is_some_and(|refusal| {
            refusal.refuses(IpNet::V4(block)) && (input.taken || (claimed && refusal.code != Code::Conflict))
        });
        if !input.held && is_refused {
            return Choice { served: None, list: Some(without(pod_cidrs, block)), wait: Some(lost(block)) };
        }
        return Choice { served: Some(confirmed), list: list(), wait: None };
    };
    if input.held || (!claimed && blocks.first() == Some(&block)) {
        let wait = if claimed {
            Some(kept(node, block, other))
        } else {
            refusal.map(|Verdict { text, .. }| {
                format!("CiliumNode {node:?} lists {other} beside {block}, which is served: {text}")
            })
        };
        return Choice { served: Some(confirmed), list: list(), wait };
    }
    move_to(other, input)
}

/// Nothing is served yet, or it is not known any more: then the block that something holds an address of is, listed or
/// not, and of the size of those that are.
fn first(input: &Input<'_>) -> Choice {
    let blocks = || input.listed.into_iter().flat_map(|listed| ipv4_blocks(listed.pod_cidrs));
    let Some(beyond) = input.beyond else {
        return Choice { served: None, list: None, wait: Some("the leases of this node are not read yet".to_owned()) };
    };
    let in_use = blocks().find(|block| beyond.iter().any(|address| block.contains(address)));
    let around = |block: Ipv4Net| {
        let around = Ipv4Net::new(*beyond.first()?, block.prefix_len()).ok()?;
        Some(Choice {
            served: Some(Served { confirmed: false, ..served_of(around.trunc(), input) }),
            list: None,
            wait: None,
        })
    };
    match (in_use, blocks().next()) {
        (Some(block), _) => move_to(block, input),
        (None, Some(block)) => around(block).unwrap_or_else(|| move_to(block, input)),
        (None, None) => {
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

fn served_of(block: Ipv4Net, input: &Input<'_>) -> Served {
    Served { block, leaving: false, node_uid: input.node_uid.map(str::to_owned), confirmed: true }
}

fn move_to(block: Ipv4Net, input: &Input<'_>) -> Choice {
    Choice { served: Some(served_of(block, input)), list: None, wait: None }
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
        "required IPv4 PodCIDR not available: {block}, which this node had, is not its own any more, and nothing on this \
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
    beyond: Option<&[Ipv4Addr]>,
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
        } else if !held {
            // A block that is held is kept, whoever lists it: thousands of lists need not be read for that.
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
    fn refusal(code: Code, block: &str) -> Verdict {
        Verdict { code, cidr: Some(IpNet::V4(net(block))), text: format!("{block}: {}", code.help()) }
    }

    /// The block to serve, and the list to write with its claim.
    type Short = (Option<String>, Option<(Vec<String>, Option<String>)>);

    /// What node n1 sees, whose Node is u1.
    struct Seen<'a> {
        now: Option<&'a Served>,
        listed: &'a [&'a str],
        claim: Option<&'a str>,
        refusal: Option<&'a Verdict>,
        taken: bool,
        node_uid: Option<&'a str>,
    }

    const NOTHING: Seen<'static> =
        Seen { now: None, listed: &[], claim: None, refusal: None, taken: false, node_uid: Some("u1") };

    impl Seen<'_> {
        fn choice(&self, held: bool) -> Choice {
            let pod_cidrs = texts(self.listed);
            let (refusal, is_contested) = (self.refusal, self.refusal.is_some());
            let listed = Listed { pod_cidrs: &pod_cidrs, claim: self.claim.map(net), refusal, is_contested };
            choose(&Input {
                node: "n1",
                served: self.now,
                listed: Some(listed),
                taken: self.taken,
                node_uid: self.node_uid,
                held,
                beyond: Some(&[]),
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
        let input = Input {
            node: "n1",
            served: None,
            listed,
            taken: false,
            node_uid: None,
            held: false,
            beyond: Some(&beyond),
        };
        assert_eq!(choose(&input).served.unwrap().block, net(B));
        assert_eq!(choose(&Input { beyond: None, ..input }).served, None);
        // It is served where it is not listed, too.
        let pod_cidrs = texts(&[A]);
        let other = Input { listed: Some(Listed { pod_cidrs: &pod_cidrs, ..Listed::default() }), ..input };
        let guessed = choose(&other).served.unwrap();
        assert_eq!(guessed.block, net(B));
        let claimed = choose(&Input { served: Some(&guessed), held: true, beyond: Some(&[]), ..other });
        assert_eq!(claimed.list.unwrap().pod_cidrs, texts(&[B, A]));
        // Before the API server has told, what was known last is served.
        let unknown = Input { served: Some(&served(A)), listed: None, taken: true, ..input };
        assert_eq!(choose(&unknown), Choice { served: Some(served(A)), list: None, wait: None });
        let leaving = Served { leaving: true, ..served(A) };
        assert!(choose(&Input { served: Some(&leaving), ..unknown }).served.unwrap().leaving);
    }

    #[test]
    fn a_block_that_pods_have_addresses_of_is_kept_and_listed_beside_another() {
        let now = served(A);
        let seen = Seen { now: Some(&now), listed: &[B], ..NOTHING };
        assert_eq!(seen.short(true), writes(A, &[A, B], Some(A)));
        let wait = seen.choice(true).wait.unwrap();
        assert!(wait.contains(A) && wait.contains(B) && wait.contains("drain"), "{wait}");
        // So it stays, and nothing more is written.
        let conflict = refusal(Code::Conflict, A);
        let claimed = Seen { listed: &[A, B], claim: Some(A), refusal: Some(&conflict), ..seen };
        assert_eq!(claimed.short(true), is(A));
        assert!(claimed.choice(true).wait.is_some());
    }

    #[test]
    fn the_other_block_is_taken_when_nothing_is_held_and_the_first_goes_off_the_list() {
        let (a, b) = (served(A), served(B));
        let conflict = refusal(Code::Conflict, A);
        let claimed = Seen { now: Some(&a), listed: &[A, B], claim: Some(A), refusal: Some(&conflict), ..NOTHING };
        assert_eq!(claimed.short(false), is(B));
        assert_eq!(Seen { now: Some(&b), ..claimed }.short(true), writes(B, &[B], Some(B)));
        assert_eq!(Seen { now: Some(&b), refusal: None, ..claimed }.short(true), writes(B, &[B], None));
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
        let belongs = refusal(Code::AlreadyAllocated, A);
        let seen = Seen { now: Some(&now), listed: &[A], refusal: Some(&belongs), taken: true, ..NOTHING };
        assert_eq!(seen.short(true), is(A));
        assert_eq!(seen.short(false), (None, Some((Vec::new(), None))));
        // Its own claim, too, though nobody lists it. What a person wrote there is for people to see.
        assert_eq!(Seen { taken: false, claim: Some(A), ..seen }.short(false), (None, Some((Vec::new(), None))));
        assert_eq!(Seen { taken: false, ..seen }.short(false), is(A));
        // The one that it belongs to keeps it.
        assert_eq!(Seen { refusal: None, ..seen }.short(false), is(A));
        // So does one whose claim is accepted as soon as an operator hears of it.
        let conflict = refusal(Code::Conflict, A);
        let alone = Seen { taken: false, claim: Some(A), refusal: Some(&conflict), ..seen };
        assert_eq!(alone.short(false), is(A));
        // A refusal of another pod CIDR is none of this one, whose text is a part of the other's.
        let other = refusal(Code::AlreadyAllocated, "110.33.0.0/26");
        assert_eq!(Seen { refusal: Some(&other), ..seen }.short(false), is(A));
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
}
