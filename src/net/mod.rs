//! The plugin's semantics over a fabric: listen, connect, accept, send, receive, flush, registration. Version-free; `abi` alone calls it.
//!
//! The life of a message, and where to read on:
//!
//! 1. `irecv` ([`receiver`]) writes a clear-to-send into the sender's CTS FIFO ([`cts_fifo`]: the ready flag is written and read there).
//! 2. `isend` ([`sender`]) finds it, cuts the message over the queue pairs of its [`link`](crate::link) and WRITEs it into the receiver's memory;
//!    the last WRITE of each stripe carries an immediate that names the slot.
//! 3. `test` on either side polls the link, and gives the sizes once all stripes are accounted for ([`recv_state`] at the receiver,
//!    [`stripe_completed`](crate::link::sends::stripe_completed) at the sender).
//!
//! Before that, three authenticated messages made the comm: [`frames`] has their bytes, [`connect`] and [`accept`] the two ends' state
//! machines, [`listen_handle`] what is carried from listen to connect.
#![forbid(unsafe_code)]

mod accept;
mod connect;
mod cts_fifo;
mod device;
mod flush;
pub mod frames;
mod handshake;
mod listen;
mod listen_handle;
mod receiver;
mod recv_comm;
mod recv_state;
mod resources;
mod send_comm;
mod sender;
#[cfg(feature = "sim")]
pub mod simulated;

#[cfg(test)]
mod tests;

use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use crate::base::config::Config;
use crate::base::error::{Error, Result};
use crate::base::log::{self, log_info};
use crate::base::stats;
use crate::base::sync::lock;
use crate::fabric::{self, Access, Domain, MemoryRegion, UserMemory};
use crate::link::address::Local;
use crate::link::memory::MrTable;

use connect::{Dialer, PendingTable};
use device::{NetDevice, Physical};
use listen_handle::ListenHandle;
use resources::Resources;

pub use crate::link::limits::{MAX_MESSAGE, MAX_RECVS, MAX_REQUESTS};
pub use crate::link::memory::{MemoryKind, MrHandle};
pub use crate::link::request::Sizes;
pub use crate::link::wr_id::RequestId;
pub use device::{PTR_CUDA, PTR_DMABUF, PTR_HOST, Properties};
pub use handshake::Mode;
pub use listen::ListenComm;
pub use listen_handle::HANDLE_SIZE;
pub use receiver::RecvBuffer;
pub use recv_comm::RecvComm;
pub use send_comm::SendComm;

/// Access of user memory. Relaxed ordering is safe: a caller reads a buffer only after `test` has said that its receive is done.
const MR_ACCESS: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_READ).union(Access::RELAXED_ORDERING);

/// The plugin's state for the settings of one `init`; `abi::instance` says how long it lives.
pub struct Net {
    config: Arc<Config>,
    local: Arc<Local>,
    physical: Vec<Arc<Physical>>,
    /// Physical ones first. Only grows.
    devices: RwLock<Vec<Arc<NetDevice>>>,
    mrs: Arc<MrTable>,
    pending: Arc<Mutex<PendingTable>>,
    _stats: stats::PageGuard,
}

impl Net {
    /// Reads the environment and lists the devices.
    ///
    /// Errors: settings that leave no device.
    pub fn open() -> Result<Arc<Net>> {
        Net::with_config(Config::from_env())
    }

    /// The same with given settings.
    pub fn with_config(config: Config) -> Result<Arc<Net>> {
        let config = Arc::new(config);
        let devices = fabric::devices(&config)?;
        Net::with_devices(config, devices)
    }

    fn with_devices(config: Arc<Config>, devices: Vec<fabric::Device>) -> Result<Arc<Net>> {
        stats::set_enabled(config.stats);
        let physical: Vec<_> = devices.into_iter().map(|device| Arc::new(Physical::new(device))).collect();
        let devices =
            physical.iter().enumerate().map(|(i, p)| NetDevice::physical(i, p.clone()).map(Arc::new)).collect::<Result<Vec<_>>>()?;
        for device in &devices {
            log_info!(
                log::NET,
                "device {}: {} on fabric {}, {} Mbit/s, {}",
                device.index(),
                device.name(),
                device.fabric(),
                device.properties().speed_mbps,
                device.addr()
            );
        }
        Ok(Arc::new(Net {
            config,
            local: Arc::new(Local::new()),
            mrs: Arc::new(MrTable::new(physical.iter().map(|physical| physical.capabilities.shares_regions))),
            physical,
            devices: RwLock::new(devices),
            pending: Arc::default(),
            _stats: stats::keep_page(),
        }))
    }

    /// Devices, virtual ones included.
    pub fn device_count(&self) -> usize {
        self.devices.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// What NCCL is told of a device.
    ///
    /// Errors: no such device.
    pub fn properties(&self, dev: usize) -> Result<Arc<Properties>> {
        self.device(dev).map(|device| device.properties().clone())
    }

    /// Fuses devices into a new one, or finds the one that is their fusion, and returns its number.
    ///
    /// Errors: no such device; devices that may not be fused.
    pub fn make_virtual(&self, devs: &[usize]) -> Result<usize> {
        let parts = devs.iter().map(|&dev| self.device(dev)).collect::<Result<Vec<_>>>()?;
        device::nics_may_fuse(&parts, &self.config)?;
        device::may_fuse(&parts, &self.config.force_merge)?;
        let mut devices = self.devices.write().unwrap_or_else(PoisonError::into_inner);
        let is_it = |device: &&Arc<NetDevice>| device.properties().vdevs == devs;
        if let Some(same) = devices.iter().skip(self.physical.len()).find(is_it) {
            return Ok(same.index());
        }
        let taken: Vec<&str> = devices.iter().map(|d| d.name()).collect();
        let fused = NetDevice::fused(devices.len(), &parts, &taken)?;
        log_info!(log::NET, "device {}: {} made of {devs:?}", fused.index(), fused.name());
        devices.push(Arc::new(fused));
        Ok(devices.len() - 1)
    }

    /// Listens on a device; any number of connections can be accepted from the comm.
    ///
    /// Errors: no such device; no port or descriptor left.
    pub fn listen(self: &Arc<Self>, dev: usize) -> Result<(ListenComm, [u8; HANDLE_SIZE])> {
        ListenComm::new(self.resources(dev)?)
    }

    /// Connects to the listener that made the handle. `Mode::NonBlocking` never waits and gives `None` for "call again with the same handle",
    /// in which it notes where it is.
    ///
    /// Errors: not a handle; nobody listens there any more; a listener on another fabric or of another release.
    pub fn connect(
        self: &Arc<Self>,
        dev: usize,
        traffic_class: Option<i32>,
        handle: &mut [u8; HANDLE_SIZE],
        mode: Mode,
    ) -> Result<Option<SendComm>> {
        let decoded = ListenHandle::decode(handle)?;
        // Held throughout, so that the thread does not end between this connect and its comm.
        let resources = self.resources(dev)?;
        let thread = resources.thread(false)?;
        let found = self.pending().take(dev, &decoded);
        ListenHandle::set_cursor(handle, 0);
        let mut dialer = match found {
            Some(dialer) => dialer,
            None => {
                let traffic_class = match self.config.traffic_class {
                    -1 => traffic_class.unwrap_or(-1),
                    from_environment => from_environment,
                };
                Box::new(Dialer::new(resources.clone(), decoded, traffic_class)?)
            }
        };
        let connected = match mode {
            Mode::Blocking => send_comm::connect_blocking(resources, dialer).map(Some),
            _ => match dialer.drive() {
                Ok(Some(connection)) => SendComm::connected(resources, connection).map(Some),
                Err(error) => Err(error),
                Ok(None) => {
                    let cursor = self.pending().put(dialer)?;
                    if let Some(thread) = thread {
                        PendingTable::watch(&self.pending, thread);
                    }
                    ListenHandle::set_cursor(handle, cursor);
                    return Ok(None);
                }
            },
        };
        self.pending().settle();
        connected
    }

    /// Registers memory for every comm of the device. Any thread, also while others drive the device's comms.
    ///
    /// Errors: no such device; a kind of memory that the device cannot reach; a range that cannot be registered.
    pub fn register(&self, dev: usize, memory: UserMemory, kind: MemoryKind) -> Result<MrHandle> {
        let device = self.device(dev)?;
        if kind != MemoryKind::Host && device.properties().ptr_support & PTR_CUDA == 0 {
            return Err(Error::usage(format!("regMr: {} {}", device.name(), no_gpu_memory(&device))));
        }
        self.register_kind(dev, memory, kind)
    }

    /// As [`Net::register`], for memory that a DMA-BUF names, from `offset` on. The descriptor stays the caller's.
    ///
    /// Errors: as there; a device that takes no DMA-BUF.
    pub fn register_dma_buf(&self, dev: usize, memory: UserMemory, kind: MemoryKind, offset: u64, fd: RawFd) -> Result<MrHandle> {
        let device = self.device(dev)?;
        if device.properties().ptr_support & PTR_DMABUF == 0 {
            return Err(Error::usage(format!("regMrDmaBuf: {} takes no DMA-BUF (no NCCL_PTR_DMABUF)", device.name())));
        }
        self.register_with(dev, memory, kind, |domain| domain.register_dma_buf(memory, MR_ACCESS, offset, fd))
    }

    /// Registers host memory as if it were a device's: for tests of the flush, of which host memory has no need.
    #[doc(hidden)]
    pub fn register_as_device(&self, dev: usize, memory: UserMemory) -> Result<MrHandle> {
        self.register_kind(dev, memory, MemoryKind::Device)
    }

    fn register_kind(&self, dev: usize, memory: UserMemory, kind: MemoryKind) -> Result<MrHandle> {
        self.register_with(dev, memory, kind, |domain| domain.register(memory, MR_ACCESS))
    }

    fn register_with(
        &self,
        dev: usize,
        memory: UserMemory,
        kind: MemoryKind,
        make: impl Fn(&Domain) -> Result<MemoryRegion>,
    ) -> Result<MrHandle> {
        let device = self.device(dev)?;
        let rails: &[usize] = &device.properties().vdevs;
        self.mrs.register(dev, rails, memory, kind, |rail| {
            let physical = self.physical.get(rail).ok_or_else(|| Error::internal(format!("regMr: no device {rail}")))?;
            make(physical.domain()?)
        })
    }

    /// Gives a registration back. Any thread. A comm that has a receive outstanding under it fails, at the latest when a message comes for it;
    /// what [`MrTable::deregister`] says of shared regions holds for RDMA NICs alone.
    ///
    /// Errors: a handle that is not known, or belongs to another device.
    pub fn deregister(&self, dev: usize, mr: MrHandle) -> Result<()> {
        self.mrs.deregister(dev, mr)
    }

    fn device(&self, dev: usize) -> Result<Arc<NetDevice>> {
        let devices = self.devices.read().unwrap_or_else(PoisonError::into_inner);
        devices.get(dev).cloned().ok_or_else(|| Error::internal(format!("no device {dev}; there are {}", devices.len())))
    }

    fn resources(&self, dev: usize) -> Result<Resources> {
        Ok(Resources { config: self.config.clone(), local: self.local.clone(), device: self.device(dev)?, mrs: self.mrs.clone() })
    }

    fn pending(&self) -> MutexGuard<'_, PendingTable> {
        lock(&self.pending)
    }
}

/// Why a GPU's memory cannot be registered by its address, and what to do.
#[cold]
fn no_gpu_memory(device: &NetDevice) -> &'static str {
    if device.fabric() == "soft" {
        "does not reach a GPU's memory (no NCCL_PTR_CUDA): the software fabric moves host memory"
    } else if device.properties().ptr_support & PTR_DMABUF != 0 {
        "does not reach a GPU's memory by its address (no NCCL_PTR_CUDA): the kernel has no peer memory (`modprobe nvidia_peermem`); \
         it takes DMA-BUFs, for which there is regMrDmaBuf (NCCL_DMABUF_ENABLE=1)"
    } else {
        "does not reach a GPU's memory by its address (no NCCL_PTR_CUDA): the kernel has no peer memory (`modprobe nvidia_peermem`), and \
         DMA-BUF does not work either (`railhead info` says why); NCCL_NET_GDR_LEVEL=LOC has NCCL go through host memory"
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        // Here and not in a device's thread, which they may be the last to hold.
        let abandoned = std::mem::take(&mut *self.pending());
        drop(abandoned);
    }
}
