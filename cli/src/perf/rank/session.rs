//! A loaded plugin with its comms to the other rank, for as long as a rank lives. Used on the thread that drives the rank.

use anyhow::{Context, bail, ensure};

use super::comms::{self, Comm, Directions};
use super::coordinator::Coordinator;
use crate::perf::message::{MAX_COMMS, PluginSpec, Started};
use crate::perf::os;
use crate::plugin::{HOST, Opaque, Plugin};

/// The plugin and its comms.
pub struct Session {
    /// Initialised.
    pub plugin: Plugin,
    /// 0 or 1.
    pub rank: usize,
    /// The device.
    pub dev: i32,
    comms: Vec<Comm>,
}

impl Session {
    /// Loads the plugin and connects with the other rank.
    pub fn start(spec: &PluginSpec, rank: usize, n: usize, coordinator: &mut Coordinator) -> anyhow::Result<(Session, Started)> {
        ensure!(n <= MAX_COMMS, "{n} comms: at most {MAX_COMMS}");
        if spec.refuse_cma {
            os::refuse_cross_memory_attach().context("seccomp")?;
        }
        let plugin = Plugin::start(&spec.path, spec.abi)?;
        let devices = plugin.devices()?;
        let name = plugin.name();
        match devices {
            n if n <= 0 => bail!("{name} has no device"),
            n => ensure!((0..n).contains(&spec.dev), "{name} has no device {}: 0 to {}", spec.dev, n - 1),
        }
        let properties = plugin.properties(spec.dev)?;
        ensure!(properties.ptr_support & HOST != 0, "device {} of {name} does not take host memory", spec.dev);
        let started = Started { name, abi: plugin.version(), device: properties.name };
        let mut session = Session { plugin, rank, dev: spec.dev, comms: Vec::new() };
        if n > 0 {
            session.comms = comms::connect(&session.plugin, spec.dev, rank, coordinator, n, Directions::Both)?;
        }
        Ok((session, started))
    }

    /// The first `n` comms.
    pub fn comms(&self, n: usize) -> anyhow::Result<&[Comm]> {
        self.comms.get(..n).with_context(|| format!("{n} comms wanted, {} set up", self.comms.len()))
    }

    /// Both directions of the first comm.
    pub fn both_ways(&self) -> anyhow::Result<(Opaque, Opaque)> {
        self.comms.first().and_then(|comm| comm.send.zip(comm.recv)).context("no comm with both directions is set up")
    }

    /// Closes the comms and the plugin.
    pub fn finish(&mut self) -> anyhow::Result<()> {
        comms::close(&self.plugin, &self.comms)?;
        self.comms.clear();
        Ok(self.plugin.finalize()?)
    }
}
