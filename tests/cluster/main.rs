//! Cistern in a real Kubernetes cluster: kubelets call the plugin, the chart installs it, pods send traffic.
//!
//! The cases share one cluster, so they run sequentially, in the order below. Each creates what it needs and leaves the
//! cluster intact. The last ones uninstall Cistern and delete the cluster.

mod faults;
mod installation;
mod network;
mod rig;
mod traffic;

use anyhow::Result;
use cistern_tests::harness::{is_thorough, timed};
use libtest_mimic::Arguments;
use std::process::ExitCode;

type Case = (&'static str, When, fn() -> Result<()>);

/// The runs that include a case. A case selected by name is always included.
#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    Always,
    /// It takes long, and others cover its parts.
    Thorough,
}

/// The cases, and the runs that include them.
const CASES: [Case; 16] = [
    ("pods_have_an_address_of_their_nodes_block", When::Always, network::addresses),
    ("pods_and_services_reach_each_other", When::Always, network::inside),
    ("pods_leave_the_cluster_as_their_node", When::Always, network::outside),
    ("the_agent_is_deleted_under_traffic", When::Always, faults::agent_deleted),
    ("a_new_image_is_rolled_out_and_back_under_traffic", When::Always, installation::upgrade_and_rollback),
    ("pods_come_and_go_while_the_agent_is_away", When::Always, faults::agent_away),
    ("kubelet_and_containerd_crash_under_traffic", When::Always, faults::node_daemons),
    ("api_server_and_etcd_are_away_under_traffic", When::Always, faults::control_plane_away),
    ("a_node_reboots", When::Always, faults::reboot),
    ("the_leader_of_the_operators_is_killed", When::Always, faults::leader_killed),
    ("a_node_is_deleted_and_comes_again", When::Always, faults::node_deleted),
    ("a_node_full_of_pods_starts_at_once", When::Thorough, network::many_pods),
    ("an_uninstall_leaves_nothing_behind", When::Always, installation::uninstall),
    ("pods_go_on_when_it_is_installed_again", When::Always, installation::install_again),
    ("kubernetes_gives_the_blocks", When::Thorough, installation::kubernetes_mode),
    ("the_cluster_leaves_nothing_behind", When::Always, installation::down),
];

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let included = |name: &str, when| {
        let asked_for = arguments.filter.as_deref().is_some_and(|filter| name.contains(filter));
        when == When::Always || is_thorough() || asked_for
    };
    let cases = CASES.into_iter().filter(|(name, when, _)| included(name, *when));
    let trials = cases.map(|(name, _, case)| {
        timed(name, move || {
            case().map_err(|error| {
                rig::describe();
                eprintln!("{name}: {error:#}");
                format!("{error:#}").into()
            })
        })
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}
