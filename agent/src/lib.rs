//! Cistern: all I/O and all wiring around the decisions of `cistern_core`.

pub mod api;
pub mod app;
pub mod cli;
pub mod clock;
pub mod cni;
pub mod controllers;
pub mod datapath;
pub mod files;
pub mod kubernetes;
pub mod netlink;
pub mod reconciler;
pub mod state;
pub mod tables;
pub mod telemetry;
