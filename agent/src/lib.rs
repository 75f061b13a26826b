//! Cistern: all I/O and all wiring around the decisions of `cistern_core`.
//!
//! ```text
//!  observe                     remember               decide                  do                       tell
//!  kubernetes::watch  ─┐                                                ┌► netlink (routes, lo) ─┐
//!  netlink::monitor   ─┼─ rows ─► tables (Arc       ─► controllers ─────┼► datapath (maps, tcx)  ─┼─► status, waits,
//!  files (ip-masq)    ─┤          snapshot +            call the core    └► kubernetes (patches)  ─┘   health, logs
//!  settings, state    ─┘          revision)             and publish                │                     `cistern …`
//!       ▲                             ▲                 desired tables             │
//!       └─────────────────────────────┴── what was realised is observed again ─────┘
//!
//!  cistern-cni ─► api (unix socket) ─► leases: one task owns the pod leases ─► state (disk), datapath
//! ```
//!
//! * **What runs where** is answered by [`app::agent_role`] and [`app::operator_role`].
//! * A **controller** waits until its inputs have synced; then, on any change, it takes a snapshot, plans, publishes. It
//!   does no I/O and names no adapter.
//! * A **reconciler** ([`reconciler::run`]) makes one target equal to one table: at once on a change, with back-off after
//!   an error, whole at start and every few minutes; additions first, surplus last.
//! * **Leases** are durable before an answer leaves, and the datapath knows a pod before its ADD succeeds.
//! * Everything in the kernel is pinned or belongs to the kernel: an agent that dies changes nothing.
//!
//! `cargo xtask check` proves that imports point one way: `main → app → controllers → core, tables, reconciler` and
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
