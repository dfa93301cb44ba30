//! Any bytes, in any pieces, to the decoder of the store's server: no panic, no memory beyond what came, and the pieces make no difference.
#![no_main]

use libfuzzer_sys::fuzz_target;
use railhead::store::tcp::wire::{Decoder, Limits};

fn requests(stream: &[u8], piece: usize) -> (Vec<String>, Option<String>) {
    let (mut decoder, mut seen, limits) = (Decoder::default(), Vec::new(), Limits::default());
    let mut fed = 0;
    for piece in stream.chunks(piece) {
        decoder.feed(piece);
        fed += piece.len();
        loop {
            match decoder.next(&limits) {
                Ok(Some(request)) => seen.push(format!("{request:?}")),
                Ok(None) => break,
                Err(error) => return (seen, Some(error.to_string())),
            }
        }
        assert!(decoder.size() <= 4 * fed + (8 << 10), "{} bytes for {fed}", decoder.size());
    }
    (seen, None)
}

fuzz_target!(|bytes: &[u8]| {
    let whole = requests(bytes, bytes.len().max(1));
    for piece in [1, 3, 64] {
        assert_eq!(whole, requests(bytes, piece), "in pieces of {piece}");
    }
});
