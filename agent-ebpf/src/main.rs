//! The kernel programs: the egress program translates the source of pod flows to the node's address, the ingress
//! program translates replies back to the pod.
//!
//! The rules are those of `cistern_core::masquerade::decide`; one table of cases runs on both.
//!
//! All packets continue to the next program (`TCX_NEXT`), except those that must be masqueraded but cannot be, which
//! are dropped and counted: with the pod's address they would get no valid reply.
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

// The programs use GPL-only helpers; the kernel reads the licence here.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 4] = *b"GPL\0";
