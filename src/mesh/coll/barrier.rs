//! A barrier by dissemination: in step i each rank tells the one 2^i after it, and hears of the one 2^i before it.

use crate::base::error::Result;
use crate::mesh::context::Context;
use crate::mesh::protocol::Small;

/// Of all ranks.
pub async fn barrier(mesh: &Context, tag: u64) -> Result<()> {
    let (rank, size) = (mesh.rank(), mesh.size());
    let mut distance = 1;
    while distance < size {
        mesh.sendrecv((rank + distance) % size, Small::NONE, (rank + size - distance) % size, 0, tag).await?;
        distance *= 2;
    }
    Ok(())
}
