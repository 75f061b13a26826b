//! Namespaces and devices of this machine, for the lease owner.

use super::kernel;
use crate::cni;
use crate::leases::Host;
use crate::netlink::Handle;
use cistern_core::ipam::audit::Namespace;
use cistern_core::ipam::lease::Attachment;
use std::path::Path;

/// The machine of this process.
#[derive(Debug, Clone, Copy)]
pub struct ThisHost;

impl Host for ThisHost {
    fn namespace(&self, path: &str) -> Namespace {
        let path = Path::new(path);
        match path.try_exists() {
            Ok(true) => Namespace::There,
            Ok(false) if path.parent().is_some_and(Path::is_dir) => Namespace::Gone,
            _ => Namespace::Unseen,
        }
    }

    fn host_side(&self, attachment: &Attachment) -> String {
        cni::host_side(&attachment.container_id, &attachment.ifname)
    }

    fn is_in_use(&self, device: &str) -> bool {
        let link = Handle::open().and_then(|mut handle| handle.link_by_name(device));
        link.map_or(true, |link| link.is_some_and(|link| link.lower_is_elsewhere))
    }

    fn remove_device(&mut self, name: &str) -> Result<(), String> {
        kernel::remove_device(name)
    }
}
