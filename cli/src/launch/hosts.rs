//! Which process runs on which host.

use super::{LaunchError, os};

/// A host of `--hosts`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Host {
    /// As ssh takes it: `name` or `user@name`.
    pub(super) name: String,
    /// How many processes it gets, if that was said.
    slots: Option<usize>,
    /// Whether it is this machine.
    pub(super) here: bool,
}

impl Host {
    pub(super) fn here() -> Self {
        Self {
            name: "localhost".into(),
            slots: None,
            here: true,
        }
    }

    /// As other hosts reach it.
    pub(super) fn address(&self) -> &str {
        self.name
            .rsplit_once('@')
            .map_or(self.name.as_str(), |(_, host)| host)
    }

    /// Whether the name means this machine on every machine.
    pub(super) fn loopback(&self) -> bool {
        ["localhost", "127.0.0.1", "::1"].contains(&self.name.as_str())
    }
}

/// Reads `name`, `name:slots`, `user@name:slots` or `[address]:slots`.
pub(super) fn parse(text: &str, this: &str) -> Result<Host, LaunchError> {
    let wrong = || {
        LaunchError::Argument(format!(
            "--hosts: '{text}' is no host: write name or name:slots"
        ))
    };
    let (name, slots) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, "")) => (address, None),
        Some((address, slots)) => (address, Some(slots.strip_prefix(':').ok_or_else(wrong)?)),
        None => match text.split_once(':') {
            Some((name, slots)) => (name, Some(slots)),
            None => (text, None),
        },
    };
    let slots = match slots {
        Some(slots) => Some(slots.parse().ok().filter(|n| *n > 0).ok_or_else(wrong)?),
        None => None,
    };
    let fits = |b: u8| b.is_ascii_alphanumeric() || b".-_:%@".contains(&b);
    // ssh would take a name with a dash in front for an option.
    if name.is_empty() || name.starts_with('-') || !name.bytes().all(fits) {
        return Err(wrong());
    }
    let mut host = Host {
        name: name.into(),
        slots,
        here: false,
    };
    let short = |name: &str| name.split('.').next().unwrap_or_default().to_string();
    host.here = host.loopback()
        || name == this
        // `node1` and `node1.cluster` are the same, `node1.a` and `node1.b` are not.
        || (!this.is_empty() && short(name) == short(this) && !(name.contains('.') && this.contains('.')));
    Ok(host)
}

/// The hosts of the command line: this machine if there are none.
pub(super) fn read(texts: &[String]) -> Result<Vec<Host>, LaunchError> {
    let this = os::host_name();
    let hosts: Vec<Host> = texts
        .iter()
        .map(|text| parse(text, &this))
        .collect::<Result<_, _>>()?;
    if hosts.is_empty() {
        return Ok(vec![Host::here()]);
    }
    for (i, host) in hosts.iter().enumerate() {
        if hosts[..i].iter().any(|other| other.name == host.name) {
            return Err(LaunchError::Argument(format!(
                "--hosts: {} is there twice: write {}:slots",
                host.name, host.name
            )));
        }
    }
    // Any of them may be where processes meet, after the first was lost.
    let nameless = hosts.iter().find(|host| host.loopback());
    if let Some(host) = nameless.filter(|_| hosts.iter().any(|host| !host.here)) {
        return Err(LaunchError::Argument(format!(
            "--hosts: to the others {} is not this machine: write its name",
            host.name
        )));
    }
    Ok(hosts)
}

/// The host of each process: in order of the hosts, so many as its slots say, the rest evenly.
pub(super) fn place(hosts: &[Host], processes: Option<usize>) -> Result<Vec<usize>, LaunchError> {
    let wrong = |text: String| Err(LaunchError::Argument(text));
    let fixed = hosts
        .iter()
        .filter_map(|host| host.slots)
        .try_fold(0usize, |sum, n| sum.checked_add(n))
        .unwrap_or(usize::MAX);
    let open = hosts.iter().filter(|host| host.slots.is_none()).count();
    let all = match processes {
        Some(all) => all,
        None if open == 0 => fixed,
        None => return wrong("say how many processes to start: -n 4".into()),
    };
    if all > super::MOST_PROCESSES {
        return wrong(format!(
            "{all} processes: at most {}",
            super::MOST_PROCESSES
        ));
    }
    if open == 0 && fixed != all {
        return wrong(format!("-n {all}: the hosts have {fixed} slots"));
    }
    let rest = all.saturating_sub(fixed);
    if rest < open {
        return wrong(format!(
            "-n {all}: not every host gets a process: give fewer hosts"
        ));
    }
    let mut share = (0..open).map(|i| rest / open + usize::from(i < rest % open));
    let counts = hosts
        .iter()
        .map(|host| host.slots.or_else(|| share.next()).unwrap_or(0));
    Ok(counts
        .enumerate()
        .flat_map(|(host, n)| std::iter::repeat_n(host, n))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(text: &str) -> Vec<Host> {
        text.split(',').map(|h| parse(h, "me").unwrap()).collect()
    }

    #[test]
    fn processes_go_to_hosts_in_order() {
        for (text, n, expected) in [
            ("a,b", Some(4), vec![0, 0, 1, 1]),
            ("a,b,c", Some(7), vec![0, 0, 0, 1, 1, 2, 2]),
            ("a:1,b:3", None, vec![0, 1, 1, 1]),
            ("a,b:2", Some(3), vec![0, 1, 1]),
            ("a:1,b,c", Some(6), vec![0, 1, 1, 1, 2, 2]),
        ] {
            assert_eq!(place(&hosts(text), n).unwrap(), expected, "{text}");
        }
        for (text, n) in [
            ("a,b", None),
            ("a,b", Some(1)),
            ("a:2,b:2", Some(5)),
            ("a:2,b", Some(2)),
            ("a:99999999999", None),
            ("a:18446744073709551615,b:2", None),
        ] {
            assert!(place(&hosts(text), n).is_err(), "{text}");
        }
    }

    #[test]
    fn hosts_are_read() {
        let host = parse("user@node1:8", "me").unwrap();
        assert_eq!(
            (host.name.as_str(), host.address(), host.slots, host.here),
            ("user@node1", "node1", Some(8), false)
        );
        assert_eq!(parse("[fe80::1%eth0]:2", "me").unwrap().slots, Some(2));
        assert_eq!(parse("[::1]", "me").unwrap().name, "::1");
        for (name, this) in [
            ("me", "me"),
            ("me", "me.cluster"),
            ("me.cluster", "me"),
            ("localhost", "x"),
        ] {
            assert!(parse(name, this).unwrap().here, "{name} {this}");
        }
        for (name, this) in [
            ("me.a", "me.b"),
            ("other", "me"),
            ("you@me", "me"),
            ("a", ""),
        ] {
            assert!(!parse(name, this).unwrap().here, "{name} {this}");
        }
        for text in [
            "",
            ":2",
            "a:",
            "a:0",
            "a:x",
            "a b",
            "-oProxyCommand=x",
            "a:1:2",
            "[::1]2",
            "a;b",
            "ä",
        ] {
            assert!(parse(text, "me").is_err(), "{text}");
        }
        let read = |list: &[&str]| read(&list.iter().map(|h| h.to_string()).collect::<Vec<_>>());
        assert!(read(&["localhost", "elsewhere"]).is_err());
        assert!(read(&["elsewhere", "::1"]).is_err());
        assert!(read(&["localhost", "127.0.0.1"]).is_ok());
        assert!(read(&["elsewhere", "elsewhere:2"]).is_err());
        assert_eq!(read(&[]).unwrap(), [Host::here()]);
    }
}
