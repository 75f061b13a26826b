//! Wiring: the command line, the settings, the two roles.
//!
//! [`agent_role`] and [`operator_role`] list the tasks of each role.

pub mod agent;
pub mod agent_api;
pub mod agent_role;
pub mod build_info;
pub mod cli;
pub mod host;
pub mod install;
pub mod kernel;
pub mod metrics;
pub mod node_status;
pub mod operator;
pub mod operator_role;
pub mod probes;
pub mod settings;
mod signals;
pub mod supervisor;
pub mod targets;
pub mod uninstall;

use crate::telemetry;
use cistern_core::settings::{LogFormat, LogLevel, Settings};

/// The configuration must not be started with; exit code 64.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Refused(pub String);

/// One TLS provider everywhere (`architecture` decision 13); with two linked, rustls panics at its first use unless one
/// is installed. Call it first in `main`.
pub fn install_tls_provider() {
    // An error means that it is installed already, with the same choice.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
}

fn start_logging(settings: &Settings) {
    let format = match settings.log_options.format {
        LogFormat::Text => telemetry::Format::Text,
        LogFormat::Json => telemetry::Format::Json,
    };
    let level = match settings.log_level() {
        LogLevel::Debug => "debug",
        LogLevel::Info => "info",
        LogLevel::Warning => "warn",
        LogLevel::Error => "error",
    };
    telemetry::init(format, level);
}
