//! Collectives: what all ranks of a mesh compute together. Each is a future over sends and receives, so that one text serves callers who block and the
//! simulator. On the caller's thread.
//!
//! All messages of a collective have one tag, made of the caller's: between two ranks, messages of one tag match in order, and both ranks send and
//! receive them in the order that the algorithm gives. So collectives that run at once need tags of their own; one after the other they do not.

mod barrier;
mod direct;
mod doubling;
mod exchange;
mod halving;
mod ring;
mod tree;

use std::time::Duration;

use crate::base::error::{Error, Result};
use crate::base::mem::UserMemory;
use crate::base::stats::MeshOp;
use crate::link::limits::MAX_MESSAGE;

use super::context::Context;
use super::device::Registered;
use super::ops::Waiter;
use super::protocol::MAX_SMALL;
use super::protocol::Tag;
use super::reduce::{MAX_ELEMENT, Reduction};
use super::running::Run;
use ring::Cut;

/// How an allreduce is done. The numbers are part of the C interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u32)]
pub enum Algorithm {
    /// Whichever is faster for so many bytes.
    #[default]
    Auto = 0,
    /// Around a ring: each rank sends no more than twice its share, in as many steps as there are ranks.
    Ring = 1,
    /// By recursive doubling: each rank sends all it has, in as many steps as the number of ranks has bits. Around a ring, if it is more than 1 GiB.
    Doubling = 2,
    /// By recursive halving and doubling: as much as around a ring, in twice as many steps as the number of ranks has bits. Around a ring, if the ranks are
    /// no power of two, or it is more than 1 GiB.
    Halving = 3,
    /// Straight between all ranks: as much as around a ring, in two steps.
    Direct = 4,
}

impl Algorithm {
    /// All, by number.
    pub const ALL: [Algorithm; 5] = [Algorithm::Auto, Algorithm::Ring, Algorithm::Doubling, Algorithm::Halving, Algorithm::Direct];
}

/// What all collectives take.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Of an allreduce, the same on all ranks.
    pub algorithm: Algorithm,
    /// Tells it from others that run at once on the mesh. [`FORK`] is for those that make another mesh.
    pub tag: u32,
    /// How long it may take.
    pub timeout: Duration,
}

impl Options {
    /// For the collectives that make another mesh.
    pub(super) fn forking(timeout: Duration) -> Options {
        Options { algorithm: Algorithm::Auto, tag: FORK, timeout }
    }
}

/// What a collective does, on its memory.
pub(super) trait Work<M>: AsyncFnOnce(&M) -> Result<()> {}

impl<M, W: AsyncFnOnce(&M) -> Result<()>> Work<M> for W {}

/// A collective that has begun: its future is that of `work` on the memory, which somebody has to poll to its end. The memory stays when that has come
/// with an error: until this rank has given up, others may read it.
pub(super) struct Begun<'a, M, W> {
    pub(super) run: Run<'a>,
    pub(super) memory: M,
    pub(super) work: W,
}

/// The tag of those, which no others should have at the same time.
pub const FORK: u32 = u32::MAX;

/// Bytes below which an allreduce is done by doubling: in fewer steps, each with all of it.
const DOUBLING_BELOW: usize = 32 << 10;
/// Most ranks among which more is done directly: each then has a message under way to every other one.
const DIRECT_RANKS: usize = 16;
/// Bytes of a chunk below which, among more ranks, it is done by halving: in fewer steps, of which none is cut into segments that travel beside the
/// reduction.
const HALVING_BELOW: usize = 1 << 20;

impl Context {
    /// Every rank's memory becomes the reduction of all ranks' memories, element by element, with the same bits on all. Each rank gives as many bytes.
    ///
    /// Errors of this and all others: bytes that do not fit together, before anything is sent; a rank that is lost, does not come, or gives other
    /// sizes, and then the mesh has failed. One with the same tag that this rank is in already, or 1024 of them, before anything is done.
    pub fn allreduce(&self, memory: UserMemory, reduction: Reduction<'_>, options: Options) -> Result<()> {
        self.wait_for(self.begin_allreduce(memory, reduction, options)?, options.timeout)
    }

    pub(super) fn begin_allreduce<'a>(
        &'a self,
        memory: UserMemory,
        reduction: Reduction<'a>,
        options: Options,
    ) -> Result<Option<Begun<'a, Registered, impl Work<Registered>>>> {
        let len = memory.len();
        whole("allreduce", len, &reduction)?;
        if self.size() == 1 || len == 0 {
            return Ok(None);
        }
        let run = self.begin(MeshOp::Allreduce, options.tag, len)?;
        let (memory, tag) = (self.register_whole(memory)?, run.tag());
        let algorithm = match options.algorithm {
            Algorithm::Auto if len < DOUBLING_BELOW => Algorithm::Doubling,
            Algorithm::Auto if self.size() <= DIRECT_RANKS => Algorithm::Direct,
            Algorithm::Auto if len / self.size() < HALVING_BELOW => Algorithm::Halving,
            Algorithm::Auto => Algorithm::Ring,
            asked => asked,
        };
        let work = async move |mine: &Registered| {
            let cut = || Cut::even(len, self.size(), reduction.element());
            match algorithm {
                Algorithm::Doubling if len <= MAX_SMALL && self.size().is_power_of_two() => {
                    doubling::allreduce_small(self, mine, reduction, tag).await
                }
                Algorithm::Doubling if len <= MAX_MESSAGE => doubling::allreduce(self, mine, reduction, tag).await,
                Algorithm::Direct => direct::allreduce(self, mine, reduction, tag).await,
                Algorithm::Halving if self.size().is_power_of_two() && len <= MAX_MESSAGE => {
                    halving::allreduce(self, mine, &cut(), reduction, tag).await
                }
                _ => ring::allreduce(self, mine, &cut(), reduction, tag).await,
            }
        };
        Ok(Some(Begun { run, memory, work }))
    }

    /// The root's `to` becomes the reduction of all ranks' `from`; the others' is not looked at. The two may be the same.
    pub fn reduce(&self, from: UserMemory, to: UserMemory, reduction: Reduction<'_>, root: usize, options: Options) -> Result<()> {
        self.root("reduce", root)?;
        let len = from.len();
        whole("reduce", len, &reduction)?;
        if len == 0 {
            return Ok(());
        }
        let run = self.begin(MeshOp::Reduce, options.tag, len)?;
        let (from, tag) = (self.register_input(from)?, run.tag());
        if self.rank() == root {
            equal("reduce", "out", to.len(), len)?;
            let to = self.register(to)?;
            copy(&from, 0, &to, 0, len)?;
            return self.block_on(Waiter::Collective(tag), tree::reduce(self, &to, len, reduction, root, tag), options.timeout);
        }
        let partial = self.scratch(len)?;
        copy(&from, 0, &partial, 0, len)?;
        self.block_on(Waiter::Collective(tag), tree::reduce(self, &partial, len, reduction, root, tag), options.timeout)?;
        partial.give_back();
        Ok(())
    }

    /// Every rank's memory becomes the root's.
    pub fn broadcast(&self, memory: UserMemory, root: usize, options: Options) -> Result<()> {
        self.wait_for(self.begin_broadcast(memory, root, options.tag)?, options.timeout)
    }

    pub(super) fn begin_broadcast(
        &self,
        memory: UserMemory,
        root: usize,
        tag: u32,
    ) -> Result<Option<Begun<'_, Registered, impl Work<Registered>>>> {
        self.root("broadcast", root)?;
        if self.size() == 1 || memory.is_empty() {
            return Ok(None);
        }
        let (run, memory) = (self.begin(MeshOp::Broadcast, tag, memory.len())?, self.register_whole(memory)?);
        let tag = run.tag();
        Ok(Some(Begun { run, memory, work: async move |mine: &Registered| tree::broadcast(self, mine, root, tag).await }))
    }

    /// `to` becomes all ranks' `from`, one behind the other. `lens` are their bytes. This rank's may lie in its place already.
    pub fn allgather(&self, from: UserMemory, to: UserMemory, lens: &[usize], options: Options) -> Result<()> {
        self.wait_for(self.begin_allgather(from, to, lens, options.tag)?, options.timeout)
    }

    pub(super) fn begin_allgather<'a>(
        &'a self,
        from: UserMemory,
        to: UserMemory,
        lens: &[usize],
        tag: u32,
    ) -> Result<Option<Begun<'a, Registered, impl Work<Registered> + use<'a>>>> {
        let cut = self.cut("allgather", lens, 1)?;
        let (at, len) = cut.chunk(self.rank());
        equal("allgather", "in", from.len(), len)?;
        equal("allgather", "out", to.len(), cut.len())?;
        if to.is_empty() {
            return Ok(None);
        }
        let run = self.begin(MeshOp::Allgather, tag, cut.longest())?;
        let (from, memory, tag) = (self.register_input(from)?, self.register(to)?, run.tag());
        copy(&from, 0, &memory, at, len)?;
        let work = async move |to: &Registered| ring::gather_half(self, to, &cut, tag, self.rank()).await;
        Ok(Some(Begun { run, memory, work }))
    }

    /// `to` becomes this rank's part of the reduction of all ranks' `from`; `lens` are the parts' bytes.
    pub fn reduce_scatter(
        &self,
        from: UserMemory,
        to: UserMemory,
        lens: &[usize],
        reduction: Reduction<'_>,
        options: Options,
    ) -> Result<()> {
        lens.iter().try_for_each(|len| whole("reduce_scatter", *len, &reduction))?;
        whole("reduce_scatter", 0, &reduction)?;
        let cut = self.cut("reduce_scatter", lens, reduction.element())?;
        let (at, len) = cut.chunk(self.rank());
        equal("reduce_scatter", "in", from.len(), cut.len())?;
        equal("reduce_scatter", "out", to.len(), len)?;
        if from.is_empty() {
            return Ok(());
        }
        let run = self.begin(MeshOp::ReduceScatter, options.tag, cut.longest())?;
        let (from, to, partial) = (self.register_input(from)?, self.register(to)?, self.scratch(cut.len())?);
        copy(&from, 0, &partial, 0, cut.len())?;
        let (left, tag) = ((self.rank() + self.size() - 1) % self.size(), run.tag());
        let reduced = ring::reduce_half(self, &partial, &cut, reduction, tag, left);
        self.block_on(Waiter::Collective(tag), reduced, options.timeout)?;
        copy(&partial, at, &to, 0, len)?;
        partial.give_back();
        Ok(())
    }

    /// Part i of `from` becomes this rank's part of rank i's `to`. `send_lens` and `recv_lens` are the parts' bytes.
    pub fn alltoall(&self, from: UserMemory, to: UserMemory, send_lens: &[usize], recv_lens: &[usize], options: Options) -> Result<()> {
        self.wait_for(self.begin_alltoall(from, to, send_lens, recv_lens, options.tag)?, options.timeout)
    }

    pub(super) fn begin_alltoall<'a>(
        &'a self,
        from: UserMemory,
        to: UserMemory,
        send_lens: &[usize],
        recv_lens: &[usize],
        tag: u32,
    ) -> Result<Option<Begun<'a, [Registered; 2], impl Work<[Registered; 2]> + use<'a>>>> {
        let (out, back) = (self.cut("alltoall", send_lens, 1)?, self.cut("alltoall", recv_lens, 1)?);
        let ((at, len), (own, own_len)) = (out.chunk(self.rank()), back.chunk(self.rank()));
        equal("alltoall", "this rank's own part", own_len, len)?;
        equal("alltoall", "in", from.len(), out.len())?;
        equal("alltoall", "out", to.len(), back.len())?;
        let run = self.begin_swap(tag)?;
        let (from, to, tag) = (self.register_input(from)?, self.register(to)?, run.tag());
        copy(&from, at, &to, own, len)?;
        let work = async move |[from, to]: &[Registered; 2]| exchange::alltoall(self, (from, &out), (to, &back), tag).await;
        Ok(Some(Begun { run, memory: [from, to], work }))
    }

    /// The same, of memory of the mesh's own, in parts of `len` bytes, once it has begun.
    pub(super) fn swap(&self, run: &Run<'_>, from: &Registered, to: &Registered, len: usize, timeout: Duration) -> Result<()> {
        let (cut, tag) = (Cut::by(&vec![len; self.size()], 1), run.tag());
        self.block_on(Waiter::Collective(tag), exchange::alltoall(self, (from, &cut), (to, &cut), tag), timeout)
    }

    /// Begins it.
    ///
    /// Errors: as for [`Context::begin`].
    pub(super) fn begin_swap(&self, tag: u32) -> Result<Run<'_>> {
        self.begin(MeshOp::Alltoall, tag, usize::MAX)
    }

    /// The root's `to` becomes all ranks' `from`, one behind the other. `lens` are their bytes.
    pub fn gather(&self, from: UserMemory, to: UserMemory, lens: &[usize], root: usize, options: Options) -> Result<()> {
        self.root("gather", root)?;
        let cut = self.cut("gather", lens, 1)?;
        let (at, len) = cut.chunk(self.rank());
        equal("gather", "in", from.len(), len)?;
        let run = self.begin(MeshOp::Gather, options.tag, cut.longest())?;
        let (from, tag) = (self.register_input(from)?, run.tag());
        if self.rank() != root {
            return self.block_on(Waiter::Collective(tag), exchange::gather(self, &from, &cut, root, tag), options.timeout);
        }
        equal("gather", "out", to.len(), cut.len())?;
        let to = self.register(to)?;
        copy(&from, 0, &to, at, len)?;
        self.block_on(Waiter::Collective(tag), exchange::gather(self, &to, &cut, root, tag), options.timeout)
    }

    /// `to` becomes this rank's part of the root's `from`. `lens` are the parts' bytes.
    pub fn scatter(&self, from: UserMemory, to: UserMemory, lens: &[usize], root: usize, options: Options) -> Result<()> {
        self.root("scatter", root)?;
        let cut = self.cut("scatter", lens, 1)?;
        let (at, len) = cut.chunk(self.rank());
        equal("scatter", "out", to.len(), len)?;
        let run = self.begin(MeshOp::Scatter, options.tag, cut.longest())?;
        let (to, tag) = (self.register(to)?, run.tag());
        if self.rank() != root {
            return self.block_on(Waiter::Collective(tag), exchange::scatter(self, &to, &cut, root, tag), options.timeout);
        }
        equal("scatter", "in", from.len(), cut.len())?;
        let from = self.register_input(from)?;
        copy(&from, at, &to, 0, len)?;
        self.block_on(Waiter::Collective(tag), exchange::scatter(self, &from, &cut, root, tag), options.timeout)
    }

    /// Returns once all ranks have called it.
    pub fn barrier(&self, options: Options) -> Result<()> {
        self.wait_for(Some(self.begin_barrier(options.tag)?), options.timeout)
    }

    pub(super) fn begin_barrier(&self, tag: u32) -> Result<Begun<'_, (), impl Work<()>>> {
        let run = self.begin(MeshOp::Barrier, tag, 0)?;
        let tag = run.tag();
        Ok(Begun { run, memory: (), work: async move |(): &()| barrier::barrier(self, tag).await })
    }

    /// Waits for what has begun, if there is anything to do.
    fn wait_for<M>(&self, begun: Option<Begun<'_, M, impl Work<M>>>, timeout: Duration) -> Result<()> {
        let Some(Begun { run, memory, work }) = begun else { return Ok(()) };
        self.block_on(Waiter::Collective(run.tag()), work(&memory), timeout)
    }

    /// Begins a collective whose longest message has so many bytes: the same number on all ranks, which the tag of its messages depends on.
    ///
    /// Errors: this rank is in one with the same tag already, or in as many as may be.
    fn begin(&self, op: MeshOp, tag: u32, longest: usize) -> Result<Run<'_>> {
        self.running.begin(Tag::collective(op, tag, longest <= MAX_SMALL))
    }

    fn root(&self, what: &str, root: usize) -> Result<()> {
        if root < self.size() {
            return Ok(());
        }
        Err(Error::usage(format!("{what}: root {root}; expected 0 to {}", self.size() - 1)))
    }

    fn cut(&self, what: &str, lens: &[usize], element: usize) -> Result<Cut> {
        if lens.len() != self.size() {
            return Err(Error::usage(format!("{what}: {} counts for {} ranks", lens.len(), self.size())));
        }
        Ok(Cut::by(lens, element))
    }
}

/// Errors: bytes that are not whole elements.
fn whole(what: &str, len: usize, reduction: &Reduction<'_>) -> Result<()> {
    let element = reduction.element();
    if (1..=MAX_ELEMENT).contains(&element) && len.is_multiple_of(element) {
        return Ok(());
    }
    Err(Error::usage(format!("{what}: {len} bytes in elements of {element}; an element has 1 to {MAX_ELEMENT}, all are whole")))
}

fn equal(what: &str, argument: &str, has: usize, wanted: usize) -> Result<()> {
    if has == wanted {
        return Ok(());
    }
    Err(Error::usage(format!("{what}: {argument} has {has} bytes; the counts say {wanted}")))
}

/// Copies `len` bytes, unless they are there.
fn copy(from: &Registered, at: usize, to: &Registered, place: usize, len: usize) -> Result<()> {
    if len > 0 {
        let (from, to) = (from.view(at, len)?, to.view(place, len)?);
        if from.addr() != to.addr() {
            to.copy_from(&from);
        }
    }
    Ok(())
}
