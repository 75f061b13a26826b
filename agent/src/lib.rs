//! Cistern: I/O and wiring around the decisions of `cistern_core`.
//!
//! ```text
//!  observe                     state                  decide                  apply                    report
//!  kubernetes::watch  ─┐                                                ┌► netlink (routes, lo) ─┐
//!  netlink::monitor   ─┼─ rows ─► tables (Arc       ─► controllers ─────┼► datapath (maps, tcx)  ─┼─► status, waits,
//!  files (ip-masq)    ─┤          snapshot +            call the core    └► kubernetes (patches)  ─┘   health, logs
//!  settings, state    ─┘          revision)             and publish                │                     `cistern …`
//!       ▲                             ▲                 desired tables             │
//!       └─────────────────────────────┴── realised state is observed again ────────┘
//!
//!  cistern-cni ─► api (unix socket) ─► leases: one task owns the pod leases ─► state (disk), tables
//! ```
//!
//! * [`app::agent_role`] and [`app::operator_role`] list the **tasks** of each role.
//! * A **controller** waits until its inputs have synced; then, on any change, it takes a snapshot, plans, publishes. It
//!   does no I/O and imports no adapter.
//! * A **reconciler** ([`reconciler::run`]) makes one target equal to one table: on every change, with back-off after
//!   an error, and in full passes at startup and every few minutes; additions first, deletions last.
//! * **Leases** are durable before an answer is sent, and a pod is in the datapath before its ADD succeeds.
//! * Everything in the kernel is pinned or independent of the process: a killed agent changes nothing.
//!
//! `cargo xtask check` enforces the direction of imports: `main → app → controllers → core, tables, reconciler` and
//! `app → adapters → core, tables, reconciler`.

pub mod api;
pub mod app;
pub mod blocking;
pub mod cli;
pub mod clock;
pub mod cni;
pub mod controllers;
pub mod datapath;
pub mod files;
pub mod install;
pub mod kubernetes;
pub mod leases;
pub mod netlink;
pub mod reconciler;
pub mod state;
pub mod tables;
pub mod telemetry;
