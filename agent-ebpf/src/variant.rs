//! Additions of the variant for tests: a program that counts packets, and a map.

use aya_ebpf::bindings::tcx_action_base::TCX_NEXT;
use aya_ebpf::btf_maps::Array;
use aya_ebpf::macros::{btf_map, classifier};
use aya_ebpf::programs::TcContext;
use cistern_ebpf_common::abi::CounterValue;
use cistern_ebpf_common::counter::Counter;

use crate::report::count;

#[btf_map(name = "cst_variant")]
static VARIANT: Array<CounterValue, 1> = Array::new();

#[classifier]
pub fn cistern_variant(_ctx: TcContext) -> i32 {
    count(Counter::Variant);
    if let Some(slot) = VARIANT.get_ptr_mut(0) {
        // SAFETY: the single slot of an array map. Racing CPUs may lose a packet, which the tests do not count.
        unsafe { (*slot).packets += 1 }
    }
    TCX_NEXT
}
