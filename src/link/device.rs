//! The device that links are made on: one device of the fabric, or several as rails; and memory that is registered there. For layers whose peers
//! meet in a store. Any thread.

use std::sync::Arc;

use crate::base::config::Config;
use crate::base::error::{Error, Result};
use crate::base::mem::{Pages, UserMemory};
use crate::base::stats::{self, CommKind, CommStats, PageGuard};
use crate::fabric::{self, Access, Capabilities, Domain, HeldMemory, MemoryRegion, PagesRegion, RegionView, SharedPages};

use super::duplex::Unconnected;
use super::limits::MAX_RAILS;
use super::queue_pairs::RailDevice;

/// Access of what peers write to.
const ACCESS: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE);

/// A device, opened. All that is made on one shares its domain.
pub struct Device {
    /// Settings.
    pub config: Config,
    name: String,
    fabric: &'static str,
    rails: Vec<(Domain, Capabilities)>,
    notify: bool,
    _stats: PageGuard,
}

impl Device {
    /// The device of this name, or the first if it is empty; several names, with a `+` between them, are rails of one.
    ///
    /// Errors: no such device, with the names that there are; none at all.
    pub fn open(config: Config, name: &str) -> Result<Arc<Device>> {
        stats::set_enabled(config.stats);
        let shared = Arc::new(config.clone());
        let all = fabric::devices(&shared)?;
        let wanted: Vec<&str> = name.split('+').filter(|part| !part.is_empty()).collect();
        let names = || all.iter().map(|device| device.info().name.as_str()).collect::<Vec<_>>().join(", ");
        let chosen: Vec<&fabric::Device> = match wanted.as_slice() {
            [] => all.iter().take(1).collect(),
            wanted => {
                let found = wanted.iter().map(|name| {
                    let device = all.iter().find(|device| device.info().name == *name);
                    device.ok_or_else(|| Error::usage(format!("there is no device {name:?}; there are {}", names())))
                });
                found.collect::<Result<_>>()?
            }
        };
        if chosen.is_empty() || chosen.len() > MAX_RAILS {
            return Err(Error::usage(format!("{} devices; there may be 1 to {MAX_RAILS}", chosen.len())));
        }
        Device::of(config, &chosen, true)
    }

    /// These devices as rails of one. `notify` if links are to be armed.
    ///
    /// Errors: one that cannot be opened.
    pub fn of(config: Config, devices: &[&fabric::Device], notify: bool) -> Result<Arc<Device>> {
        let rails = devices.iter().map(|device| Ok((device.open()?, device.capabilities()))).collect::<Result<Vec<_>>>()?;
        let name = devices.iter().map(|device| device.info().name.as_str()).collect::<Vec<_>>().join("+");
        let fabric = devices.first().map_or("none", |device| device.info().fabric);
        Ok(Arc::new(Device { config, name, fabric, rails, notify, _stats: stats::keep_page() }))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Name of its fabric.
    pub fn fabric(&self) -> &'static str {
        self.fabric
    }

    /// One end of a link to be.
    ///
    /// Errors: no memory or queue pair left.
    pub fn end(&self) -> Result<Unconnected> {
        let stats = stats::comm(CommKind::Pair, self.name());
        Unconnected::new(&self.rails(&stats), self.fabric(), self.name(), &self.config, stats, self.notify)
    }

    /// Descriptors of this process that a link takes at least, once it is connected.
    pub fn descriptors_per_link(&self) -> usize {
        let qps = self.config.qps_per_rail as usize;
        self.rails.iter().map(|(_, capabilities)| qps * capabilities.descriptors_per_qp as usize).sum()
    }

    fn rails(&self, stats: &CommStats) -> Vec<RailDevice> {
        let rails = self.rails.iter().enumerate();
        rails
            .map(|(i, (domain, capabilities))| RailDevice { domain: domain.clone(), capabilities: *capabilities, stats: stats.rail(i) })
            .collect()
    }

    /// Registers memory until the result is dropped.
    ///
    /// Errors: a range that cannot be registered.
    pub fn register(&self, memory: UserMemory) -> Result<Registered> {
        self.register_for(memory, ACCESS)
    }

    /// The same for memory that is only read, by this side and for sends.
    pub fn register_input(&self, memory: UserMemory) -> Result<Registered> {
        self.register_for(memory, Access::empty())
    }

    /// Holds memory of messages that are so small that neither this side's device nor a peer gets at it.
    pub fn hold(&self, memory: UserMemory) -> Registered {
        Registered { held: (!memory.is_empty()).then(|| HeldMemory::new(memory)), ..Registered::new(Vec::new()) }
    }

    fn register_for(&self, memory: UserMemory, access: Access) -> Result<Registered> {
        let rails = self.rails.iter().take(if memory.is_empty() { 0 } else { MAX_RAILS });
        Ok(Registered::new(rails.map(|(domain, _)| Ok(Region::User(domain.register(memory, access)?))).collect::<Result<_>>()?))
    }

    /// Registers so many bytes of our own, at least one.
    pub fn scratch(&self, len: usize) -> Result<Registered> {
        let pages = Pages::new(len.max(1))?;
        let rails = self.rails.iter();
        Ok(Registered::new(rails.map(|(domain, _)| Ok(Region::Own(domain.register_pages(&pages, ACCESS)?))).collect::<Result<_>>()?))
    }

    /// The same, which peers on this host may map. They take a descriptor each.
    pub fn shared_scratch(&self, len: usize) -> Result<Registered> {
        let shared = SharedPages::new(len.max(1))?;
        let rails = self.rails.iter();
        let regions = rails.map(|(domain, _)| Ok(Region::Own(domain.register_pages(shared.pages(), ACCESS)?))).collect::<Result<_>>()?;
        Ok(Registered { shared: Some(shared), ..Registered::new(regions) })
    }
}

/// Memory that is registered on one rail, or on none.
enum Region {
    User(MemoryRegion),
    Own(PagesRegion),
}

impl Region {
    fn lkey(&self) -> u32 {
        match self {
            Region::User(region) => region.lkey(),
            Region::Own(region) => region.lkey(),
        }
    }

    fn rkey(&self) -> u32 {
        match self {
            Region::User(region) => region.rkey(),
            Region::Own(region) => region.rkey(),
        }
    }

    fn view(&self) -> RegionView<'_> {
        match self {
            Region::User(region) => region.view(),
            Region::Own(region) => region.view(),
        }
    }
}

/// Memory that messages come from and go to, registered until this is dropped.
pub struct Registered {
    /// Rail by rail; none for no bytes, and for those that are held.
    regions: Vec<Region>,
    held: Option<HeldMemory>,
    /// Memory of our own. Dropped after the regions.
    shared: Option<SharedPages>,
    lkeys: [u32; MAX_RAILS],
    rkeys: [u32; MAX_RAILS],
}

impl Registered {
    fn new(regions: Vec<Region>) -> Registered {
        let keys = |key: fn(&Region) -> u32| std::array::from_fn(|rail| regions.get(rail).map_or(0, key));
        let (lkeys, rkeys) = (keys(Region::lkey), keys(Region::rkey));
        Registered { regions, held: None, shared: None, lkeys, rkeys }
    }

    fn whole(&self) -> Option<RegionView<'_>> {
        self.held.as_ref().map(HeldMemory::view).or_else(|| self.regions.first().map(Region::view))
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.whole().map_or(0, |view| view.len())
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.whole().is_none()
    }

    /// Whether peers on this host may map it.
    pub fn is_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// `len` bytes from `offset` on.
    ///
    /// Errors: they are not all inside.
    pub fn view(&self, offset: usize, len: usize) -> Result<RegionView<'_>> {
        let part = self.whole().and_then(|view| view.part(offset, len));
        part.ok_or_else(|| Error::usage(format!("{len} bytes at offset {offset} of a buffer of {}", self.len())))
    }

    /// The keys for local use, rail by rail.
    pub fn lkeys(&self) -> [u32; MAX_RAILS] {
        self.lkeys
    }

    /// The peers' keys, rail by rail.
    pub fn rkeys(&self) -> [u32; MAX_RAILS] {
        self.rkeys
    }
}
