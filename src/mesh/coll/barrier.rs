//! A barrier by dissemination: in step i each rank tells the one 2^i after it, and hears of the one 2^i before it.

use crate::base::error::Result;
use crate::link::limits::MAX_RAILS;
use crate::mesh::context::Mesh;
use crate::mesh::device::{Part, Place};

/// No bytes.
const NOTHING: Part = Part { addr: 0, len: 0, lkeys: [0; MAX_RAILS] };
const NOWHERE: Place = Place { addr: 0, len: 0, rkeys: [0; MAX_RAILS] };

/// Of all ranks.
pub async fn barrier(mesh: &Mesh, tag: u64) -> Result<()> {
    let (rank, size) = (mesh.rank(), mesh.size());
    let mut distance = 1;
    while distance < size {
        let heard = mesh.recv((rank + size - distance) % size, tag, NOWHERE)?;
        let told = mesh.send((rank + distance) % size, tag, NOTHING)?;
        heard.await?;
        told.await?;
        distance *= 2;
    }
    Ok(())
}
