//! The kernel programs: one sees packets before they leave by an egress device and gives pod flows the node's address,
//! the other sees packets that come in by it and gives answers back to the pod.
//!
//! The rules are those of `cistern_core::masquerade::decide`; one table of cases runs on both.
//!
//! Every packet goes on to whatever is attached behind us (`TCX_NEXT`), but for those that need the node's address and
//! cannot get it, which are dropped and counted: with the pod's address they would only confuse the other side.
#![no_std]
#![no_main]

mod egress;
mod ingress;
mod maps;
mod nat;
mod packet;
mod report;
#[cfg(feature = "test-variant")]
mod variant;

#[cfg(not(test))]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

// The kernel allows the helpers that the programs call to GPL-compatible programs alone, and reads it here.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 4] = *b"GPL\0";
