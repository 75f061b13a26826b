//! Panics in tasks of an agent that runs as in production: blocking work on threads, the wall clock.

use super::stalls::{SETTINGS, eventually};
use super::*;
use cistern::install::NetworkConfiguration;
use cistern::leases::LeaseStore;
use cistern::tables::Waits;
use cistern_core::ipam::lease::Change;

struct Panicking;

impl LeaseStore for Panicking {
    fn write(&mut self, _: &Change) -> Result<(), String> {
        panic!("index out of range");
    }
}

fn ends_with_the_name_of_the_task(name: &str, change: impl FnOnce(Agent) -> Agent, extend: impl FnOnce(&mut Running)) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let mut world = World::new(&Archive::parse(""), 1, 0, None).unwrap();
        world.add_machine("a").unwrap();
        let on_threads = |agent| change(Agent { ports: Ports::threads(), ..agent });
        world.start_agent_as("a", SETTINGS, on_threads, extend).unwrap();
        eventually("the agent ends", || world.check_roles().is_err()).await;
        let error = world.take_role("agent", "a").unwrap().stop().await.unwrap_err();
        assert!(error.contains(&format!("task {name:?} of agent")) && error.contains("panic"), "{error}");
    });
}

#[test]
fn a_panic_of_the_lease_owner_ends_the_agent() {
    let change = |agent| Agent { lease_store: Box::new(Panicking), ..agent };
    ends_with_the_name_of_the_task("pod leases", change, |_| {});
}

#[test]
fn a_panic_in_a_loop_of_the_process_ends_the_agent() {
    ends_with_the_name_of_the_task(
        "mark served",
        |agent| agent,
        |running| running.spawn("mark served", ServedMarker::default().keep(|| panic!("index out of range"))),
    );
}

#[test]
fn a_panic_in_a_loop_that_blocks_ends_the_agent() {
    ends_with_the_name_of_the_task(
        "CNI configuration",
        |agent| agent,
        |running| {
            let mut settings = read_settings("a", SETTINGS, Command::Agent).unwrap();
            let directory = tempfile::tempdir().unwrap();
            settings.write_cni_conf_when_ready = Some(directory.path().join("05-cistern.conflist"));
            let configuration = NetworkConfiguration::of(&settings).unwrap();
            let keep = configuration.keep(|| panic!("index out of range"), Waits::new(Clock::system()));
            running.spawn_blocking("CNI configuration", &Ports::threads().disk, keep);
        },
    );
}
