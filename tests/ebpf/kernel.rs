//! The kernel programs as a machine for cases.

use crate::frame;
use aya::maps::lpm_trie::{Key, LpmTrie};
use aya::maps::{Array, HashMap, Map, MapData};
use aya::programs::{SchedClassifier, TestRun, TestRunOptions};
use cistern::datapath::{Build, Capacities, Datapath, Devices, Endpoints, Events, Excluded, Settings, View};
use cistern_core::masquerade::cases::{self, Machine};
use cistern_core::masquerade::decide::{Direction, Packet, Verdict};
use cistern_core::masquerade::plan::{DatapathSettings, DeviceEntry, EndpointEntry, ExcludedReason};
use cistern_ebpf_common::abi::{ExcludedAddress, ExcludedValue, FlowKey, FwdValue, SettingsValue};
use ipnet::Ipv4Net;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::Path;

/// `TCX_NEXT`: continue with the next program.
const NEXT: i32 = -1;
/// `TCX_DROP`.
const DROP: i32 = 2;

/// `ifindex` of the loopback device, used by test runs.
pub(crate) const LOOPBACK: u32 = 1;

/// Small maps, because a test loads many.
pub(crate) const CAPACITIES: Capacities = Capacities { flows: 4_096, inbound: 1_024 };

/// Programs and maps, set up as the fixture of the cases.
pub(crate) struct Kernel {
    pub(crate) datapath: Datapath,
    pub(crate) events: Option<Events>,
    pub(crate) excluded: Excluded,
    pub(crate) endpoints: Endpoints,
    pub(crate) devices: Devices,
    pub(crate) settings: Settings,
    pub(crate) view: View,
    egress: SchedClassifier,
    ingress: SchedClassifier,
    counters: BTreeMap<&'static str, u64>,
}

impl Kernel {
    pub(crate) fn new(root: &Path) -> Self {
        Self::with(root, CAPACITIES)
    }

    pub(crate) fn with(root: &Path, capacities: Capacities) -> Self {
        let mut kernel = Self::of(root, &Build::embedded().expect("object"), capacities);
        kernel.settings.set(&cases::settings()).expect("settings");
        for (address, entry) in cases::endpoints() {
            kernel.endpoints.insert(address, entry).expect("endpoint");
        }
        kernel.exclude_fixture();
        kernel.readdress(Some(cases::NODE));
        kernel
    }

    pub(crate) fn exclude_fixture(&mut self) {
        for (prefix, reason) in cases::excluded() {
            self.excluded.insert(prefix, reason).expect("excluded");
        }
    }

    /// Programs of this build with maps whose rows are those of the pinned ones.
    pub(crate) fn of(root: &Path, build: &Build<'_>, capacities: Capacities) -> Self {
        let (datapath, events) = Datapath::open_build(root, build, capacities, &mut |_| Ok(())).expect("load");
        let program = |name| SchedClassifier::from_pin(datapath.pins().program(name)).expect("pinned program");
        Self {
            excluded: datapath.excluded().expect("excluded"),
            endpoints: datapath.endpoints().expect("endpoints"),
            devices: datapath.devices().expect("devices"),
            settings: datapath.settings([0x0123_4567_89ab_cdef, 0xfedc_ba98_7654_3210]).expect("settings"),
            view: datapath.view().expect("view"),
            egress: program("cistern_egress"),
            ingress: program("cistern_ingress"),
            counters: BTreeMap::new(),
            events: Some(events),
            datapath,
        }
    }

    /// Runs a program on a frame that arrived by the device of its source pod; returns the verdict's number and the
    /// resulting frame.
    pub(crate) fn pass(&self, direction: Direction, frame: &[u8]) -> (i32, Vec<u8>) {
        self.pass_by(direction, cases::device(*frame::ends(frame).0.ip()), frame)
    }

    /// [`Kernel::pass`] for a frame that arrived by this device.
    pub(crate) fn pass_by(&self, direction: Direction, device: u32, frame: &[u8]) -> (i32, Vec<u8>) {
        let mut out = vec![0; frame.len() + 64];
        let context = frame::context(device);
        let options = TestRunOptions {
            data_in: Some(frame),
            data_out: Some(&mut out),
            ctx_in: Some(&context),
            ..TestRunOptions::new()
        };
        let program = if direction == Direction::Egress { &self.egress } else { &self.ingress };
        let result = program.test_run(options).expect("test run");
        out.truncate(frame.len());
        (result.return_value.cast_signed(), out)
    }

    /// Names of the counters that increased since the last call.
    pub(crate) fn counted(&mut self) -> Vec<String> {
        let now: BTreeMap<&str, u64> =
            self.view.counters().expect("counters").into_iter().map(|(kind, packets)| (kind.name(), packets)).collect();
        let rose = now
            .iter()
            .filter(|(name, packets)| self.counters.get(*name).copied().unwrap_or(0) < **packets)
            .map(|(name, _)| (*name).to_owned())
            .collect();
        self.counters = now;
        rose
    }

    pub(crate) fn map<T: TryFrom<Map, Error = aya::maps::MapError>>(&self, name: &str) -> T {
        let data = MapData::from_pin(self.datapath.pins().map(name)).expect("pinned map");
        T::try_from(Map::from_map_data(data).expect("map")).expect("map type")
    }
}

impl Machine for Kernel {
    fn send(&mut self, direction: Direction, packet: &Packet) -> (Verdict, Vec<String>) {
        let frame = frame::build(packet, b"payload");
        let (number, after) = self.pass_by(direction, packet.device, &frame);
        let verdict = match number {
            NEXT => frame::verdict(&frame, &after),
            DROP => Verdict::Drop,
            other => panic!("the program returned {other}"),
        };
        (verdict, self.counted())
    }

    fn exclude(&mut self, prefix: Ipv4Net, reason: ExcludedReason) {
        self.excluded.insert(prefix, reason).expect("exclude");
    }

    fn include(&mut self, prefix: Ipv4Net) {
        self.excluded.remove(prefix).expect("include");
    }

    fn endpoint(&mut self, address: Ipv4Addr, entry: Option<EndpointEntry>) {
        match entry {
            Some(entry) => self.endpoints.insert(address, entry).expect("endpoint"),
            None => self.endpoints.remove(address).expect("endpoint"),
        }
    }

    fn configure(&mut self, settings: &DatapathSettings) {
        self.settings.set(settings).expect("settings");
    }

    fn readdress(&mut self, address: Option<Ipv4Addr>) {
        self.devices.insert(LOOPBACK, DeviceEntry { address }).expect("device");
    }

    fn lose_cache(&mut self) {
        let mut cache: HashMap<MapData, FlowKey, FwdValue> = self.map("cst_fwd");
        let keys: Vec<FlowKey> = cache.keys().collect::<Result<_, _>>().expect("keys");
        for key in keys {
            cache.remove(&key).expect("remove");
        }
    }

    /// The clock cannot be set forward, but the times it is compared with can be set back.
    fn close_windows(&mut self) {
        let mut slot: Array<MapData, SettingsValue> = self.map("cst_settings");
        let value = slot.get(&0, 0).expect("settings");
        slot.set(0, SettingsValue { policy_changed: 0, ..value }, 0).expect("settings");
        let mut trie: LpmTrie<MapData, ExcludedAddress, ExcludedValue> = self.map("cst_excluded");
        let rows: Vec<(Key<ExcludedAddress>, ExcludedValue)> = trie.iter().collect::<Result<_, _>>().expect("rows");
        for (key, value) in rows {
            trie.insert(&key, ExcludedValue { since: 0, ..value }, 0).expect("row");
        }
    }

    fn flows(&mut self) -> usize {
        self.view.flows().expect("flows").len()
    }
}

/// A pod that is masqueraded, for packets from any device.
pub(crate) const POD: EndpointEntry = EndpointEntry { ifindex: 0, no_masquerade: false, generation: 1 };
