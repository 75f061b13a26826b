use super::*;
use proptest::prelude::*;

const TIMINGS: Timings =
    Timings { duration: LEASE_DURATION, renew_deadline: RENEW_DEADLINE, retry_period: RETRY_PERIOD };

fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn held_by(holder: &str, renewed: &str) -> Record {
    Record {
        holder: Some(holder.to_owned()),
        duration_seconds: Some(15),
        transitions: 3,
        renewed: Some(renewed.to_owned()),
    }
}

fn candidate(record: Option<Record>, changed: u64, now: u64) -> Action {
    evaluate(&Observation::first(record, s(changed)), "me", None, &TIMINGS, s(now))
}

fn leader(record: Option<Record>, renewed: u64, now: u64) -> Action {
    evaluate(&Observation::first(record, s(0)), "me", Some(s(renewed)), &TIMINGS, s(now))
}

#[test]
fn timings_out_of_order_are_refused() {
    assert_eq!(Timings::new(s(15), s(10), s(2)), Ok(Timings::default()));
    let odd = Duration::from_millis(15_500);
    for (duration, deadline, retry) in
        [(s(10), s(10), s(2)), (s(15), s(2), s(2)), (s(15), s(10), s(0)), (odd, s(10), s(2)), (s(1 << 40), s(10), s(2))]
    {
        let error = Timings::new(duration, deadline, retry).unwrap_err().to_string();
        assert!(error.contains("duration > renew deadline > retry period > 0"), "{error}");
    }
}

#[test]
fn a_lease_without_holder_is_acquired_at_once() {
    assert_eq!(candidate(None, 0, 0), Action::Acquire { transitions: 0, timeout: s(10) });
    for holder in [None, Some(String::new())] {
        let released = Record { holder, ..held_by("", "t") };
        assert_eq!(candidate(Some(released), 0, 0), Action::Acquire { transitions: 4, timeout: s(10) });
    }
    // Our own claim whose answer was lost.
    assert_eq!(candidate(Some(held_by("me", "t")), 0, 1), Action::Acquire { transitions: 3, timeout: s(10) });
}

#[test]
fn another_holder_has_its_whole_duration_from_the_observation_of_its_last_write() {
    let wait = |until| Action::Wait { until: s(until), holder: Some("other".to_owned()) };
    let take = Action::Acquire { transitions: 4, timeout: s(10) };
    let record = || Some(held_by("other", "long ago"));
    assert_eq!(candidate(record(), 100, 100), wait(102));
    assert_eq!(candidate(record(), 100, 114), wait(115));
    assert_eq!(candidate(record(), 100, 115), take);
    // Its own duration; ours if that is invalid.
    let lasting = |seconds| Some(Record { duration_seconds: seconds, ..held_by("other", "t") });
    assert_eq!(candidate(lasting(Some(60)), 100, 159), wait(160));
    assert_eq!(candidate(lasting(Some(60)), 100, 160), take);
    for nonsense in [None, Some(0), Some(-5)] {
        assert_eq!(candidate(lasting(nonsense), 100, 114), wait(115));
        assert_eq!(candidate(lasting(nonsense), 100, 115), take);
    }
}

#[test]
fn only_a_change_counts_and_not_the_holder_s_clock() {
    let mut seen = Observation::first(Some(held_by("other", "2001-01-01T00:00:00Z")), s(0));
    // The holder's clock is in the past, in the future, goes backwards: each new value restarts the duration.
    for (second, word) in [(5, "2999-01-01T00:00:00Z"), (10, "1999-01-01T00:00:00Z"), (12, "1999-01-01T00:00:00Z")] {
        seen.look(Some(held_by("other", word)), s(second));
    }
    assert_eq!(seen.changed, s(10));
    assert!(matches!(evaluate(&seen, "me", None, &TIMINGS, s(24)), Action::Wait { .. }));
    assert!(matches!(evaluate(&seen, "me", None, &TIMINGS, s(25)), Action::Acquire { .. }));
}

#[test]
fn a_leader_renews_at_the_retry_period_and_steps_down_at_the_deadline() {
    let mine = || Some(held_by("me", "t"));
    assert_eq!(leader(mine(), 100, 101), Action::Wait { until: s(102), holder: None });
    assert_eq!(leader(mine(), 100, 102), Action::Renew { timeout: s(8) });
    // Slow or failing writes get the remaining time, and none is started at the end.
    assert_eq!(leader(mine(), 100, 109), Action::Renew { timeout: s(1) });
    let loss = |seconds| Loss::Deadline { since_renewal: s(seconds), deadline: s(10) };
    assert_eq!(leader(mine(), 100, 110), Action::StepDown { loss: loss(10) });
    // A process that was paused for an hour notices before it does anything else.
    assert_eq!(leader(mine(), 100, 3_700), Action::StepDown { loss: loss(3_600) });
}

#[test]
fn a_leader_that_is_not_named_any_more_steps_down() {
    assert_eq!(leader(None, 100, 101), Action::StepDown { loss: Loss::Deleted });
    let taken = |holder: Option<&str>| Action::StepDown { loss: Loss::Taken { holder: holder.map(str::to_owned) } };
    assert_eq!(leader(Some(held_by("other", "t")), 100, 101), taken(Some("other")));
    assert_eq!(leader(Some(Record { holder: None, ..held_by("", "t") }), 100, 101), taken(None));
}

/// A running write: when it reaches the API server, when the answer arrives, and when the caller gives up.
#[derive(Debug)]
struct Write {
    begun: u64,
    arrives: u64,
    answers: u64,
    timeout: u64,
    version: u64,
    record: Record,
    outcome: Option<bool>,
}

#[derive(Debug)]
struct Process {
    name: String,
    clock_offset: u64,
    seen: Option<(Observation, u64)>,
    leading: Option<Duration>,
    paused_until: u64,
    write: Option<Write>,
}

/// One tick is 100 ms. Clocks are monotonic with different offsets; reads and writes are slow, or lost before or after
/// they took effect; processes are paused for longer than the lease duration.
fn simulate(seed: u64) -> (u64, u64) {
    let mut state = seed | 1;
    let mut random = move |bound: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % bound
    };
    let mut lease: (Option<Record>, u64) = (None, 0);
    let mut processes: Vec<Process> = (0..3)
        .map(|index| Process {
            name: format!("p{index}"),
            clock_offset: random(1_000_000),
            seen: None,
            leading: None,
            paused_until: 0,
            write: None,
        })
        .collect();
    let (mut led, mut terms) = (0, 0);
    // Writes that arrive after their process has given up.
    let mut orphans: Vec<Write> = Vec::new();
    for tick in 0..3_000_u64 {
        let mut arriving: Vec<&mut Write> = processes.iter_mut().filter_map(|process| process.write.as_mut()).collect();
        arriving.extend(&mut orphans);
        for write in arriving {
            if tick >= write.arrives && write.outcome.is_none() {
                let applied = write.version == lease.1;
                if applied {
                    lease = (Some(write.record.clone()), lease.1 + 1);
                }
                write.outcome = Some(applied);
            }
        }
        for process in &mut processes {
            let now = |tick: u64| Duration::from_millis((tick + process.clock_offset) * 100);
            if tick < process.paused_until {
                continue;
            }
            if random(150) == 0 {
                process.paused_until = tick + random(400);
                continue;
            }
            if let Some(write) = process.write.take() {
                if tick >= write.timeout {
                    orphans.push(write);
                } else if tick < write.answers {
                    process.write = Some(write);
                    continue;
                } else if write.outcome == Some(true) {
                    if process.leading.is_none() {
                        terms += 1;
                    }
                    process.leading = Some(now(write.begun));
                    let seen = Observation::first(Some(write.record), now(tick));
                    process.seen = Some((seen, write.version + 1));
                }
            }
            // The watch lags at times.
            if random(3) > 0 {
                match &mut process.seen {
                    Some((seen, version)) => {
                        seen.look(lease.0.clone(), now(tick));
                        *version = lease.1;
                    }
                    None => process.seen = Some((Observation::first(lease.0.clone(), now(tick)), lease.1)),
                }
            }
            let Some((seen, version)) = &process.seen else { continue };
            let (transitions, timeout) = match evaluate(seen, &process.name, process.leading, &TIMINGS, now(tick)) {
                Action::Acquire { transitions, timeout } => (transitions, timeout),
                Action::Renew { timeout } => (seen.record.as_ref().map_or(0, |record| record.transitions), timeout),
                Action::Wait { .. } => continue,
                Action::StepDown { .. } => {
                    process.leading = None;
                    continue;
                }
            };
            let slow = if random(4) == 0 { 160 } else { 3 };
            let arrives = tick + random(slow);
            process.write = Some(Write {
                begun: tick,
                arrives,
                answers: arrives + 1 + random(slow),
                timeout: tick + timeout.as_millis() as u64 / 100,
                version: *version,
                record: Record {
                    holder: Some(process.name.clone()),
                    duration_seconds: Some(15),
                    transitions,
                    renewed: Some(format!("{} {tick}", process.name)),
                },
                outcome: None,
            });
        }
        let able = processes.iter().filter(|process| {
            let now = Duration::from_millis((tick + process.clock_offset) * 100);
            process.leading.is_some_and(|renewed| now < TIMINGS.leads_until(renewed))
        });
        match able.count() {
            0 => {}
            1 => led += 1,
            _ => panic!("seed {seed}, tick {tick}: two leaders may write: {processes:?}"),
        }
    }
    (led, terms)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn never_two_processes_may_write_at_once(seed in any::<u64>()) {
        simulate(seed);
    }
}

#[test]
fn in_that_simulation_there_is_a_leader_for_most_of_the_time_and_leadership_changes() {
    let (led, terms) = (1..=20).map(simulate).fold((0, 0), |sum, (led, terms)| (sum.0 + led, sum.1 + terms));
    assert!(led > 20 * 3_000 / 2, "{led}");
    assert!(terms > 20 * 2, "{terms}");
}
