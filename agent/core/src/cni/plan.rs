//! The ordered steps of ADD, each with its inverse.
//!
//! ADD runs its steps in order; when one fails, the inverses of those before it (and of the one that failed, which may
//! have had a part of its effect) run in reverse. DEL runs the inverse of every step and goes on after a failure. In the
//! role of an IPAM plugin only the steps with the agent remain.

use super::netconf::Role;

/// One step of ADD.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The agent gives a provisional lease.
    Lease,
    /// The pair, the pod's side made inside its namespace. What an attempt that was killed left under one of its names
    /// is removed first.
    MakePair,
    /// Address, routes and neighbour of the pod's side.
    SetUpPod,
    /// Settings and route of the host's side.
    SetUpHost,
    /// The agent confirms the lease; the datapath knows the pod, unless its packets do not pass the node's routing.
    Confirm,
}

/// What takes back the effect of steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Undo {
    /// The pair goes, and with it its addresses, routes and neighbours.
    RemovePair,
    /// The agent takes the lease back, confirmed or not.
    Release,
}

/// ADD.
#[must_use]
pub fn add(role: Role) -> &'static [Step] {
    match role {
        Role::Interface => &[Step::Lease, Step::MakePair, Step::SetUpPod, Step::SetUpHost, Step::Confirm],
        Role::Ipam => &[Step::Lease, Step::Confirm],
    }
}

/// DEL: the device first, so that nothing sends from an address that may be allocated again. The role is not asked for: it
/// follows from a configuration that may be damaged by now, and in the role of an IPAM plugin there is no pair to remove.
pub const DEL: [Undo; 2] = [Undo::RemovePair, Undo::Release];

impl Step {
    /// What takes this step back; none when there is nothing to take back.
    #[must_use]
    pub fn inverse(self) -> Option<Undo> {
        match self {
            Self::Lease | Self::Confirm => Some(Undo::Release),
            Self::MakePair => Some(Undo::RemovePair),
            // They go with the pair.
            Self::SetUpPod | Self::SetUpHost => None,
        }
    }
}

/// What to run after `failed` failed: in reverse, each once.
#[must_use]
pub fn undo_after(role: Role, failed: Step) -> Vec<Undo> {
    let steps = add(role);
    let reached = steps.iter().position(|step| *step == failed).map_or(steps.len(), |position| position + 1);
    let mut undo = Vec::new();
    for inverse in steps.iter().take(reached).rev().filter_map(|step| step.inverse()) {
        // The lease goes back last: a device must not be left with an address that another pod may get.
        undo.retain(|other| *other != inverse);
        undo.push(inverse);
    }
    undo
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_fails_the_lease_goes_back_and_goes_back_last() {
        for role in [Role::Interface, Role::Ipam] {
            let position = |wanted| add(role).iter().position(|step| *step == wanted);
            for step in add(role) {
                let undo = undo_after(role, *step);
                assert_eq!(undo.last(), Some(&Undo::Release), "{role:?} {step:?}");
                let made = position(Step::MakePair).is_some_and(|make| position(*step) >= Some(make));
                assert_eq!(undo.contains(&Undo::RemovePair), made, "{role:?} {step:?}");
                assert!(undo.iter().all(|undo| DEL.contains(undo)), "{role:?} {step:?}: DEL does it too");
                assert!(undo.len() <= 2, "{role:?} {step:?}: each once");
            }
        }
    }
}
