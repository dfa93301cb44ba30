//! What a rank tells of its ends towards all others, in the order of their ranks and without its own: the first address whole, and of each that follows
//! how it differs from the one before. Among 256 ranks all read all, which whole addresses would make 3 GB. On the thread that connects.

use crate::base::error::{Error, Result};
use crate::link::address::Address;

const CUT: &str = "is cut short";

/// The list of a rank's addresses, which have one length.
///
/// Errors: they have not.
pub fn encode(addresses: &[Vec<u8>]) -> Result<Vec<u8>> {
    let mut list = addresses.first().cloned().unwrap_or_default();
    for pair in addresses.windows(2) {
        let [before, now] = pair else { continue };
        if before.len() != now.len() {
            return Err(Error::internal("addresses of one rank differ in length"));
        }
        // Runs of equal bytes and of others: how many of either, and the others.
        let mut rest = before.iter().zip(now).peekable();
        while rest.peek().is_some() {
            let same = std::iter::from_fn(|| rest.next_if(|(before, now)| before == now)).take(255).count();
            let other: Vec<u8> =
                std::iter::from_fn(|| rest.next_if(|(before, now)| before != now)).map(|(_, now)| *now).take(255).collect();
            list.extend([same as u8, other.len() as u8]);
            list.extend(other);
        }
    }
    Ok(list)
}

/// The address at this place of a list, if there is one, and how many it has.
///
/// Errors: what is wrong with the list, in words that follow "its address".
pub fn find(list: &[u8], place: usize) -> std::result::Result<(Option<Vec<u8>>, usize), String> {
    if list.is_empty() {
        return Ok((None, 0));
    }
    let (_, len) = Address::decode(list)?;
    let (first, mut rest) = list.split_at_checked(len).ok_or(CUT)?;
    let mut address = first.to_vec();
    let (mut found, mut count) = ((place == 0).then(|| address.clone()), 1);
    while !rest.is_empty() {
        let mut left = address.as_mut_slice();
        while !left.is_empty() {
            let [same, other, more @ ..] = rest else { return Err(CUT.into()) };
            let (other, more) = more.split_at_checked(usize::from(*other)).ok_or(CUT)?;
            let (_, behind) = left.split_at_mut_checked(usize::from(*same)).ok_or(CUT)?;
            let (to, behind) = behind.split_at_mut_checked(other.len()).ok_or(CUT)?;
            to.copy_from_slice(other);
            (left, rest) = (behind, more);
        }
        if count == place {
            found = Some(address.clone());
        }
        count += 1;
    }
    Ok((found, count))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::{ENDPOINT_SIZE, Endpoint};
    use crate::link::address::Local;

    /// As those of one rank: equal but for some bytes.
    fn addresses(count: usize) -> Vec<Vec<u8>> {
        let local = Local::new();
        let one = |i: usize| {
            let mut endpoint = [0; ENDPOINT_SIZE];
            let token = (i as u128 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c834);
            endpoint[4] = i as u8;
            endpoint[12..28].copy_from_slice(&token.to_le_bytes());
            let (fabric, device) = ("soft".into(), "lo".into());
            let memory = 0x7f00_0000_0000 + i as u64 * 0x2000;
            Address {
                local: local.clone(),
                fabric,
                device,
                memory,
                qps_per_rail: 1,
                failover: false,
                rkeys: vec![!(i as u32)],
                endpoints: vec![Endpoint(endpoint)],
            }
            .encode()
        };
        (0..count).map(one).collect()
    }

    #[test]
    fn each_address_is_found_in_its_place() {
        for count in [0, 1, 2, 255, 300] {
            let all = addresses(count);
            let list = encode(&all).unwrap();
            for (place, address) in all.iter().enumerate() {
                assert_eq!(find(&list, place), Ok((Some(address.clone()), count)));
            }
            assert_eq!(find(&list, count), Ok((None, count)));
            assert!(count < 255 || list.len() * 4 < all.concat().len(), "{} bytes for {}", list.len(), all.concat().len());
        }
        let (long, short) = (vec![1; 600], vec![2; 599]);
        assert!(encode(&[long, short]).is_err());
    }

    #[test]
    fn damaged_lists_are_refused_or_have_other_addresses() {
        let list = encode(&addresses(5)).unwrap();
        for end in 1..list.len() {
            let found = find(&list[..end], 4);
            assert!(found.as_ref().is_err() || found.unwrap().1 < 5, "{end} bytes");
        }
        for at in 0..list.len() {
            for value in [0, 1, 255] {
                let mut damaged = list.clone();
                damaged[at] = value;
                let _ = find(&damaged, 4);
            }
        }
    }
}
