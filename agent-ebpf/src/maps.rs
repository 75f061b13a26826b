//! The maps. Names, types and sizes are in the shared crate, so that user space can compare pinned maps with them.

use aya_ebpf::btf_maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray};
use aya_ebpf::macros::btf_map;
use cistern_ebpf_common::abi::{
    CounterValue, DeviceKey, DeviceValue, EndpointKey, EndpointValue, EventsValue, ExcludedAddress, ExcludedValue,
    FlowKey, FwdValue, InboundValue, PortWord, RevKey, RevValue, SettingsValue, TriesValue,
};
use cistern_ebpf_common::map::{
    COUNTER_ENTRIES, DEVICE_ENTRIES, ENDPOINT_ENTRIES, EXCLUDED_ENTRIES, FWD_ENTRIES, INBOUND_ENTRIES, PORT_WORDS,
    REV_ENTRIES,
};

#[btf_map(name = "cst_rev")]
pub(crate) static REV: HashMap<RevKey, RevValue, REV_ENTRIES> = HashMap::new();

#[btf_map(name = "cst_fwd")]
pub(crate) static FWD: LruHashMap<FlowKey, FwdValue, FWD_ENTRIES> = LruHashMap::new();

#[btf_map(name = "cst_inbound")]
pub(crate) static INBOUND: LruHashMap<FlowKey, InboundValue, INBOUND_ENTRIES> = LruHashMap::new();

#[btf_map(name = "cst_endpoints")]
pub(crate) static ENDPOINTS: HashMap<EndpointKey, EndpointValue, ENDPOINT_ENTRIES> = HashMap::new();

#[btf_map(name = "cst_devices")]
pub(crate) static DEVICES: HashMap<DeviceKey, DeviceValue, DEVICE_ENTRIES> = HashMap::new();

#[btf_map(name = "cst_excluded")]
pub(crate) static EXCLUDED: LpmTrie<ExcludedAddress, ExcludedValue, EXCLUDED_ENTRIES> = LpmTrie::new();

#[btf_map(name = "cst_settings")]
pub(crate) static SETTINGS: Array<SettingsValue, 1> = Array::new();

#[btf_map(name = "cst_ports")]
pub(crate) static PORTS: Array<PortWord, PORT_WORDS> = Array::new();

#[btf_map(name = "cst_tries")]
pub(crate) static TRIES: Array<TriesValue, 1> = Array::new();

#[btf_map(name = "cst_events")]
pub(crate) static EVENTS: Array<EventsValue, 1> = Array::new();

#[btf_map(name = "cst_counters")]
pub(crate) static COUNTERS: PerCpuArray<CounterValue, COUNTER_ENTRIES> = PerCpuArray::new();
