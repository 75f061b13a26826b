//! The real agent and operator: started, stopped in order, killed.

use super::{Outcome, silent};
use crate::script::world::World;

pub(super) fn start_operator(world: &mut World, arguments: &[&str]) -> Outcome {
    let [name, settings @ ..] = arguments else {
        return Err("expected: operator/start NAME [SETTINGS_FILE]".to_owned());
    };
    let settings = match settings {
        [] => String::new(),
        [file] => world.file(file)?.to_owned(),
        _ => return Err("expected: operator/start NAME [SETTINGS_FILE]".to_owned()),
    };
    world.start_operator(name, &settings)?;
    Ok(silent())
}

/// Ends roles as SIGTERM does, and waits for their end.
pub(super) async fn stop(world: &mut World, role: &str, names: &[&str]) -> Outcome {
    for name in names {
        world.take_role(role, name)?.stop().await?;
    }
    Ok(silent())
}

/// Ends roles as SIGKILL does: nothing that they try from now on arrives anywhere.
pub(super) async fn kill(world: &mut World, role: &str, names: &[&str]) -> Outcome {
    for name in names {
        world.take_role(role, name)?.kill().await;
    }
    Ok(silent())
}
