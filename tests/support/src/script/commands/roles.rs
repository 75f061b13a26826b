//! The real agent and operator: start, orderly stop, kill.

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

/// Stops roles as by SIGTERM, and waits for their termination.
pub(super) async fn stop(world: &mut World, role: &str, names: &[&str]) -> Outcome {
    for name in names {
        world.take_role(role, name)?.stop().await?;
    }
    Ok(silent())
}

/// Kills roles as by SIGKILL: no further operation takes effect.
pub(super) async fn kill(world: &mut World, role: &str, names: &[&str]) -> Outcome {
    for name in names {
        world.take_role(role, name)?.kill().await;
    }
    Ok(silent())
}
