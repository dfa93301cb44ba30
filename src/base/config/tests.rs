//! Tests of the table.

use std::collections::HashMap;
use std::os::unix::ffi::OsStringExt;

use super::*;

/// The settings that these variables give, and what was said about them.
fn read(vars: &[(&str, &str)]) -> (Config, Vec<(Level, String)>) {
    let env: HashMap<&str, OsString> = vars.iter().map(|&(name, value)| (name, value.into())).collect();
    let mut said = Vec::new();
    let names = vars.iter().map(|(name, _)| name.to_string());
    let config = Config::from(&|name| env.get(name).cloned(), names, &mut |level, text| said.push((level, text)));
    (config, said)
}

#[test]
fn nothing_set_gives_the_defaults_in_silence() {
    assert_eq!(read(&[]), (Config::default(), vec![]));
    assert_eq!(read(&[("NCCL_DEBUG", "INFO"), ("PATH", "/bin")]), (Config::default(), vec![]));
}

#[test]
fn every_default_is_accepted_where_it_is_written_out() {
    for row in rows() {
        for name in [Some(row.env), row.alias].into_iter().flatten() {
            assert_eq!(read(&[(name, &row.default)]), (Config::default(), vec![]), "{name}={}", row.default);
        }
    }
}

#[test]
fn a_value_is_taken_and_told_once_with_its_source() {
    let (config, said) = read(&[("RAILHEAD_SHM_BOUNCE_KIB", " 0x80 "), ("NCCL_SOCKET_IFNAME", "^lo,eth")]);
    let aliases = vec!["NCCL_SOCKET_IFNAME"];
    assert_eq!(config, Config { shm_bounce_kib: 128, socket_ifname: "^lo,eth".into(), aliases, ..Config::default() });
    assert_eq!(config.variable("RAILHEAD_SOCKET_IFNAME"), "NCCL_SOCKET_IFNAME");
    assert_eq!(config.variable("RAILHEAD_SHM_BOUNCE_KIB"), "RAILHEAD_SHM_BOUNCE_KIB");
    let told: Vec<_> = said.iter().map(|(level, text)| (*level, text.as_str())).collect();
    assert_eq!(
        told,
        [(Level::Info, "RAILHEAD_SHM_BOUNCE_KIB=128"), (Level::Info, "NCCL_SOCKET_IFNAME=^lo,eth (as RAILHEAD_SOCKET_IFNAME)")]
    );
}

#[test]
fn our_own_name_wins_over_the_alias() {
    let (config, said) = read(&[("NCCL_IB_TC", "8"), ("RAILHEAD_TC", "9")]);
    assert_eq!((config.traffic_class, config.variable("RAILHEAD_TC")), (9, "RAILHEAD_TC"));
    assert_eq!(said.len(), 1);
    // Even where it only says the default.
    assert_eq!(read(&[("NCCL_IB_TC", "8"), ("RAILHEAD_TC", "-1")]), (Config::default(), vec![]));
}

#[test]
fn a_bad_value_is_reported_with_the_accepted_ones_and_the_default_stands() {
    let cases = [
        ("RAILHEAD_SHM_BOUNCE_KIB", "63", "64..65536"),
        ("RAILHEAD_SHM_BOUNCE_KIB", "65537", "64..65536"),
        ("RAILHEAD_SHM_BOUNCE_KIB", "", "64..65536"),
        ("RAILHEAD_SHM_BOUNCE_KIB", "0x", "64..65536"),
        ("RAILHEAD_SHM_BOUNCE_KIB", "128k", "64..65536"),
        ("RAILHEAD_SHM_BOUNCE_KIB", "-128", "64..65536"),
        ("RAILHEAD_SHM_BOUNCE_KIB", "99999999999999999999", "64..65536"),
        ("NCCL_NSOCKS_PERTHREAD", "-2", "0..16"),
        ("RAILHEAD_TC", "-2", "-1..255"),
        ("RAILHEAD_TC", "256", "-1..255"),
        ("RAILHEAD_FABRIC", "ib", "auto, verbs, soft"),
        ("RAILHEAD_SOFT_WIRE", "", "auto, shm, tcp"),
        ("RAILHEAD_CMA", "2", "auto, 1, 0"),
        ("RAILHEAD_PORT_RANGE", "80-90", "LOW-HIGH"),
        ("RAILHEAD_PORT_RANGE", "3000-2999", "LOW-HIGH"),
        ("RAILHEAD_PORT_RANGE", "3000", "LOW-HIGH"),
        ("RAILHEAD_PORT_RANGE", "3000-65536", "LOW-HIGH"),
        ("RAILHEAD_STALL_WARN_S", "86400.001", "0..86400, in thousandths"),
        ("RAILHEAD_STALL_WARN_S", "0.0001", "thousandths"),
        ("RAILHEAD_STALL_WARN_S", ".5", "thousandths"),
        ("RAILHEAD_STALL_WARN_S", "1.", "thousandths"),
        ("RAILHEAD_STALL_WARN_S", "-1", "thousandths"),
        ("RAILHEAD_STALL_WARN_S", "1e3", "thousandths"),
        ("RAILHEAD_STALL_WARN_S", "9999999999", "thousandths"),
        ("RAILHEAD_TCP_CONGESTION", "", "algorithm"),
        ("RAILHEAD_TCP_CONGESTION", "sixteen_letters_", "algorithm"),
        ("RAILHEAD_TCP_CONGESTION", "../bbr", "algorithm"),
    ];
    for (name, value, accepted) in cases {
        let (config, said) = read(&[(name, value)]);
        assert_eq!(config, Config::default(), "{name}={value}");
        assert_eq!(said.len(), 1, "{name}={value}");
        assert_eq!(said[0].0, Level::Warn, "{name}={value}");
        assert!(said[0].1.contains(&format!("{name}={value} ")) && said[0].1.contains(accepted), "{}", said[0].1);
    }
}

#[test]
fn seconds_have_thousandths() {
    for (text, nanos, shown) in [("0.2", 200_000_000, "0.2"), ("10", 10_000_000_000, "10"), ("0.005", 5_000_000, "0.005"), ("0", 0, "0")] {
        let (config, said) = read(&[("RAILHEAD_STALL_WARN_S", text)]);
        assert_eq!(config.stall_warn_s.nanos(), nanos, "{text}");
        assert!(said.iter().all(|(level, said)| *level == Level::Info && *said == format!("RAILHEAD_STALL_WARN_S={shown}")), "{said:?}");
    }
}

#[test]
fn bytes_that_are_no_text_are_a_bad_value() {
    let mut said = Vec::new();
    // Any text would do here.
    let env = |name: &str| (name == "RAILHEAD_FORCE_MERGE").then(|| OsString::from_vec(vec![b'a', 0xff]));
    let config = Config::from(&env, std::iter::empty(), &mut |level, _| said.push(level));
    assert_eq!((config, said), (Config::default(), vec![Level::Warn]));
}

#[test]
fn both_ends_of_a_range_and_every_choice_are_accepted() {
    for row in rows() {
        let values: Vec<&str> = match row.accepted.split_once("..") {
            Some((low, high)) if !row.accepted.contains('`') => vec![low, high.split(',').next().unwrap_or_default()],
            _ if row.accepted.contains('`') || row.accepted == "any text" => continue,
            _ => row.accepted.split(", ").collect(),
        };
        assert!(values.len() >= 2, "{}", row.env);
        for value in values {
            let upper = value.to_ascii_uppercase();
            for (_, said) in [read(&[(row.env, value)]), read(&[(row.env, &upper)])] {
                assert!(said.iter().all(|(level, _)| *level == Level::Info), "{said:?}");
            }
        }
    }
}

#[test]
fn an_unknown_name_of_ours_is_reported() {
    let (config, said) = read(&[("RAILHEAD_FABRICS", "soft")]);
    assert_eq!(config, Config::default());
    assert_eq!(said.len(), 1);
    assert!(said[0].0 == Level::Warn && said[0].1.contains("RAILHEAD_FABRICS is not"), "{said:?}");
    assert!(said[0].1.contains("did you mean RAILHEAD_FABRIC?"), "{said:?}");
}

#[test]
fn a_port_range_is_read_as_it_was_accepted() {
    assert_eq!(parse_ports("1024-65535"), Some(1024..=65535));
    assert_eq!(parse_ports("4000-4000"), Some(4000..=4000));
    assert_eq!(parse_ports(""), None);
}

#[test]
fn the_page_has_a_row_for_every_setting() {
    let page = markdown();
    for name in NAMES {
        assert_eq!(page.matches(&format!("| `{name}` |")).count(), 1, "{name}");
    }
    assert!(page.contains("| `RAILHEAD_SPLIT_MIN` |  | `65536` | 128..1073741824 |"), "{page}");
}

#[test]
fn a_secret_is_taken_and_shown_nowhere() {
    let (config, said) = read(&[("RAILHEAD_STORE_SECRET", "sesame")]);
    assert_eq!(config.store_secret.key(), Some(&b"sesame"[..]));
    assert_eq!(said, [(Level::Info, "RAILHEAD_STORE_SECRET=(hidden)".to_owned())]);
    assert!(!format!("{config:?}").contains("sesame"));
    assert_eq!(Config::default().store_secret.key(), None);
}

#[test]
fn a_secret_that_is_none_is_not_shown_either() {
    for bad in [&b"open sesame\xff"[..], b"  ", b"\t\n"] {
        let env = |name: &str| (name == "RAILHEAD_STORE_SECRET").then(|| OsString::from_vec(bad.to_vec()));
        let mut said = Vec::new();
        let config = Config::from(&env, [].into_iter(), &mut |level, text| said.push((level, text)));
        assert_eq!(config.store_secret.key(), None);
        let words = "RAILHEAD_STORE_SECRET=(hidden) is not accepted (UTF-8 text that is not blank, or empty); using the default, empty";
        assert_eq!(said, [(Level::Warn, words.to_owned())]);
        let shown = format!("{:?}", Effective::of(&env));
        assert!(shown.contains("RAILHEAD_STORE_SECRET") && !shown.contains("open sesame"), "{shown}");
    }
    assert_eq!(read(&[("RAILHEAD_STORE_SECRET", "")]), (Config::default(), vec![]));
    assert_eq!(read(&[("RAILHEAD_STORE_SECRET", " a b\n")]).0.store_secret.key(), Some(&b"a b"[..]));
}
