//! Any bytes to what reads the addresses of links, and of all ends of a rank: what is read is written as it was, and lists have no more in them than
//! their bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use railhead::link::address::{Address, MAX_ADDRESS};
use railhead::mesh::fuzzed::find_address;

fuzz_target!(|bytes: &[u8]| {
    let Some((place, list)) = bytes.split_first() else { return };
    let first = Address::decode(list);
    if let Ok((address, len)) = &first {
        assert!(*len <= MAX_ADDRESS);
        assert_eq!(address.encode(), list[..*len], "{address:?}");
    }
    let (place, found) = (usize::from(*place), find_address(list, usize::from(*place)));
    if let Ok((found, count)) = found {
        assert_eq!(found.is_some(), place < count, "{place} of {count}");
        assert!(count <= 1 + list.len() / 2);
        if let (Some(found), Ok((_, len))) = (found, first) {
            assert_eq!(found.len(), len);
        }
    }
});
