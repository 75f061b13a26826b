//! Cistern in a real Kubernetes cluster: kubelets call the plugin, the chart installs it, pods speak.
//!
//! There is one cluster, so the cases run one after the other, in the order below. Each brings up what it misses and
//! leaves the cluster whole. The last ones take Cistern off and the cluster down.

mod faults;
mod installation;
mod network;
mod rig;
mod traffic;

use anyhow::Result;
use libtest_mimic::{Arguments, Trial};
use std::process::ExitCode;
use std::time::Instant;

type Case = (&'static str, fn() -> Result<()>);

const CASES: [Case; 16] = [
    ("pods_have_an_address_of_their_nodes_block", network::addresses),
    ("pods_and_services_reach_each_other", network::inside),
    ("pods_leave_the_cluster_as_their_node", network::outside),
    ("the_agent_is_deleted_under_traffic", faults::agent_deleted),
    ("a_new_image_is_rolled_out_and_back_under_traffic", installation::upgrade_and_rollback),
    ("pods_come_and_go_while_the_agent_is_away", faults::agent_away),
    ("kubelet_and_containerd_crash_under_traffic", faults::node_daemons),
    ("api_server_and_etcd_are_away_under_traffic", faults::control_plane_away),
    ("a_node_reboots", faults::reboot),
    ("the_leader_of_the_operators_is_killed", faults::leader_killed),
    ("a_node_is_deleted_and_comes_again", faults::node_deleted),
    ("a_node_full_of_pods_starts_at_once", network::many_pods),
    ("an_uninstall_leaves_nothing_behind", installation::uninstall),
    ("pods_go_on_when_it_is_installed_again", installation::install_again),
    ("kubernetes_gives_the_blocks", installation::kubernetes_mode),
    ("the_cluster_leaves_nothing_behind", installation::down),
];

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let trials = CASES.map(|(name, case)| {
        Trial::test(name, move || {
            let start = Instant::now();
            let outcome = case();
            eprintln!("cluster: {name}: {} s", start.elapsed().as_secs());
            outcome.map_err(|error| {
                rig::describe();
                eprintln!("{name}: {error:#}");
                format!("{error:#}").into()
            })
        })
    });
    libtest_mimic::run(&arguments, trials.into()).exit_code()
}
