//! The steps of ADD, each with its inverse.
//!
//! ADD runs its steps in order; if one fails, its inverse (it may have had partial effect) and those of the previous
//! steps run in reverse order. DEL runs all inverses and continues after failures. In the role of an IPAM plugin only
//! the steps with the agent remain.

use super::netconf::Role;

/// A step of ADD.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The agent allocates a provisional lease.
    Lease,
    /// Creates the veth pair, with the pod's side inside its namespace. Remains of a killed attempt under one of its
    /// names are deleted first.
    MakePair,
    /// Address, routes and neighbour of the pod's side.
    SetUpPod,
    /// Sysctls and route of the host's side.
    SetUpHost,
    /// The agent confirms the lease, and the datapath gets the pod, unless its packets bypass the node's routing.
    Confirm,
}

/// The inverse of steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Undo {
    /// Delete the pair, including its addresses, routes and neighbours.
    RemovePair,
    /// The agent releases the lease, confirmed or not.
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
    /// The inverse of this step, if any.
    #[must_use]
    pub fn inverse(self) -> Option<Undo> {
        match self {
            Self::Lease | Self::Confirm => Some(Undo::Release),
            Self::MakePair => Some(Undo::RemovePair),
            // Deleted with the pair.
            Self::SetUpPod | Self::SetUpHost => None,
        }
    }
}

/// The inverses to run after `failed` failed: in reverse order, each once.
#[must_use]
pub fn undo_after(role: Role, failed: Step) -> Vec<Undo> {
    let steps = add(role);
    let reached = steps.iter().position(|step| *step == failed).map_or(steps.len(), |position| position + 1);
    let mut undo = Vec::new();
    for inverse in steps.iter().take(reached).rev().filter_map(|step| step.inverse()) {
        // The lease is released last: a device must not remain with an address that another pod may get.
        undo.retain(|other| *other != inverse);
        undo.push(inverse);
    }
    undo
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn on_any_failure_the_lease_is_released_last() {
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
