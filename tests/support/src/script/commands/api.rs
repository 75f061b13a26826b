//! Time, faults, links and the record of calls.

use std::time::Duration;

use super::{Outcome, Printed, exactly, silent};
use crate::apiserver::{Call, CallMatch, Fault, Link, Verb};
use crate::script::world::World;

/// Resolution of objects' ages: API objects have whole seconds.
const SHORTEST_AGE: Duration = Duration::from_secs(1);

pub(super) async fn sleep(world: &World, arguments: &[&str]) -> Outcome {
    let [text] = exactly(arguments, "sleep DURATION, for example 250ms, 15s, 10m or 2h")?;
    let duration = duration(text)?;
    if duration >= SHORTEST_AGE {
        world.server.grow_older();
    }
    tokio::time::sleep(duration).await;
    Ok(silent())
}

fn duration(text: &str) -> Result<Duration, String> {
    let unit = text.trim_start_matches(|c: char| c.is_ascii_digit());
    let number: u64 = text.trim_end_matches(unit).parse().map_err(|_| format!("{text}: expected a duration"))?;
    match unit {
        "ms" => Ok(Duration::from_millis(number)),
        "s" => Ok(Duration::from_secs(number)),
        "m" => Ok(Duration::from_secs(number * 60)),
        "h" => Ok(Duration::from_secs(number * 3600)),
        _ => Err(format!("{text}: expected the unit ms, s, m or h")),
    }
}

pub(super) fn faults(world: &mut World, arguments: &[&str]) -> Outcome {
    let (text, spared) = match arguments {
        [text] => (*text, Vec::new()),
        [text, "except", spared @ ..] => (*text, spared.to_vec()),
        _ => return Err("expected: faults off|PERCENT [except RESOURCE…]".to_owned()),
    };
    let percent = if text == "off" { 0 } else { text.parse().map_err(|_| format!("{text}: expected a number"))? };
    world.set_faults(percent, &spared);
    Ok(silent())
}

pub(super) fn fault(world: &World, arguments: &[&str]) -> Outcome {
    let usage = "fault TIMES FAULT [client=NAME] [verb=VERB] [resource=PLURAL[/status]] [name=NAME]";
    let [times, fault, filters @ ..] = arguments else { return Err(format!("expected: {usage}")) };
    let times = times.parse().map_err(|_| format!("{times}: expected how many times"))?;
    let fault = match *fault {
        "timeout-before" => Fault::TimeoutBefore,
        "timeout-after" => Fault::TimeoutAfter,
        "reset-before" => Fault::ResetBefore,
        "reset-after" => Fault::ResetAfter,
        "watch-expired" => Fault::WatchExpired,
        "watch-cut" => Fault::WatchCut(0),
        code => Fault::Refused(code.parse().map_err(|_| format!("{code}: no fault and no HTTP status"))?),
    };
    let (calls, words) = filter(filters)?;
    if let Some(word) = words.first() {
        return Err(format!("{word}: expected: {usage}"));
    }
    world.server.ask_fault(calls, fault, times);
    Ok(silent())
}

/// Parses `key=value` filters; returns the words without `=`.
fn filter<'a>(arguments: &[&'a str]) -> Result<(CallMatch, Vec<&'a str>), String> {
    let (mut calls, mut words) = (CallMatch::default(), Vec::new());
    for argument in arguments {
        let Some((key, value)) = argument.split_once('=') else {
            words.push(*argument);
            continue;
        };
        match key {
            "client" => calls.client = Some(value.to_owned()),
            "name" => calls.name = Some(value.to_owned()),
            "resource" => {
                let (resource, subresource) = value.split_once('/').unwrap_or((value, ""));
                calls.resource = Some(resource.to_owned());
                calls.subresource = Some(subresource.to_owned());
            }
            "verb" => {
                let known = Verb::ALL.into_iter().find(|verb| verb.name() == value);
                calls.verb = Some(known.ok_or_else(|| format!("{value}: not a verb of RBAC"))?);
            }
            other => return Err(format!("{other}: expected client, verb, resource or name")),
        }
    }
    Ok((calls, words))
}

/// Calls that match filters and the words `changed` (it changed something) and `write` (a write verb).
fn matching(world: &World, arguments: &[&str]) -> Result<Vec<Call>, String> {
    let (filter, words) = filter(arguments)?;
    if let Some(word) = words.iter().find(|word| !["changed", "write"].contains(word)) {
        return Err(format!("{word}: expected changed, write or a filter"));
    }
    let mut calls = world.server.calls();
    calls.retain(|call| {
        filter.matches(call)
            && (!words.contains(&"changed") || call.changed)
            && (!words.contains(&"write") || call.verb.is_write())
    });
    Ok(calls)
}

pub(super) fn calls(world: &World, arguments: &[&str]) -> Outcome {
    let calls = matching(world, arguments)?;
    Ok(Printed::Text(calls.iter().map(|call| format!("{call}\n")).collect()))
}

/// The first argument is the expected number of matching calls, or a bound: `<=3`.
pub(super) fn count(world: &World, arguments: &[&str]) -> Outcome {
    let Some((wanted, filters)) = arguments.split_first() else {
        return Err("expected: api/count NUMBER|<=NUMBER [changed] [write] [FILTER…]".to_owned());
    };
    let calls = matching(world, filters)?;
    let (bound, number) = match wanted.strip_prefix("<=") {
        Some(number) => (true, number),
        None => (false, *wanted),
    };
    let number: usize = number.parse().map_err(|_| format!("{wanted}: expected a number"))?;
    if calls.len() == number || bound && calls.len() < number {
        return Ok(silent());
    }
    let list: String = calls.iter().map(|call| format!("\n    {call}")).collect();
    Err(format!("{} calls match, expected {wanted}{list}", calls.len()))
}

pub(super) fn forget(world: &World) -> Outcome {
    world.server.clear_calls();
    Ok(silent())
}

pub(super) fn compact(world: &World) -> Outcome {
    if world.server.is_real() {
        return Err("a real server forgets in its own time: `# server: small, WHY`".to_owned());
    }
    world.server.compact();
    Ok(silent())
}

pub(super) fn backup(world: &mut World) -> Outcome {
    world.backup = Some(world.server.snapshot().map_err(|error| format!("{error:#}"))?);
    Ok(silent())
}

pub(super) fn restore(world: &World) -> Outcome {
    let backup = world.backup.as_ref().ok_or("there is no backup: api/backup comes first")?;
    world.server.restore_from(backup).map_err(|error| format!("{error:#}"))?;
    Ok(silent())
}

pub(super) fn link(world: &World, command: &str, arguments: &[&str]) -> Outcome {
    let link = match command {
        "api/down" => Link::Refused,
        "api/silent" => Link::Silent,
        "api/held" => Link::Held,
        _ => Link::Up,
    };
    match arguments {
        [] => world.server.set_link(link),
        clients => clients.iter().for_each(|client| world.server.set_client_link(client, link)),
    }
    Ok(silent())
}
