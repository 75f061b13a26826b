//! The real agent and operator: started, stopped in order, killed.

use super::{Outcome, silent};
use crate::script::world::World;

pub(super) fn start(world: &mut World, role: &str, arguments: &[&str]) -> Outcome {
    let (name, settings) = match arguments {
        [name] => (name, String::new()),
        [name, file] => (name, world.file(file)?.to_owned()),
        _ => return Err(format!("expected: {role}/start NAME [SETTINGS_FILE]")),
    };
    match role {
        "agent" => world.start_agent(name, &settings)?,
        _ => world.start_operator(name, &settings)?,
    }
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
