//! The ordered steps of ADD, each with its inverse.
//!
//! ADD runs its steps in order; when one fails, the inverses of those before it (and of the one that failed, which may
//! have had a part of its effect) run in reverse. DEL runs the inverse of every step and goes on after a failure.

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
    /// Settings, route and neighbour of the host's side.
    SetUpHost,
    /// The agent confirms the lease; the datapath knows the pod.
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
pub const ADD: [Step; 5] = [Step::Lease, Step::MakePair, Step::SetUpPod, Step::SetUpHost, Step::Confirm];

/// DEL: the device first, so that nothing sends from an address that may be given again.
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
pub fn undo_after(failed: Step) -> Vec<Undo> {
    let reached = ADD.iter().position(|step| *step == failed).map_or(ADD.len(), |position| position + 1);
    let mut undo = Vec::new();
    for inverse in ADD.iter().take(reached).rev().filter_map(|step| step.inverse()) {
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
        for step in ADD {
            let undo = undo_after(step);
            assert_eq!(undo.last(), Some(&Undo::Release), "{step:?}");
            let made =
                ADD.iter().position(|other| *other == step) >= ADD.iter().position(|other| *other == Step::MakePair);
            assert_eq!(undo.contains(&Undo::RemovePair), made, "{step:?}");
            assert!(undo.len() <= 2, "{step:?}: each once");
        }
    }
}
