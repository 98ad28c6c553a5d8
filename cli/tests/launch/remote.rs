//! Other hosts. `ssh` is a script here that runs what it is given in a session of its own.

use super::*;
use std::os::unix::fs::PermissionsExt;

/// A folder with an `ssh` that forgets the environment, as the real one does.
fn ssh() -> (Folder, String) {
    let folder = Folder::new();
    let file = folder.path("ssh");
    let script = "#!/bin/sh\n\
        while [ \"$1\" != -- ]; do shift; done\n\
        [ \"$2\" = unreachable ] && { echo no route >&2; exit 255; }\n\
        exec setsid -w env -i PATH=\"$PATH\" SSH_HOST=\"$2\" sh -c \"$3\"\n";
    std::fs::write(&file, script).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!(
        "{}:{}",
        folder.0.display(),
        std::env::var("PATH").unwrap_or_default()
    );
    (folder, path)
}

fn remote(path: &str, args: &[&str], script: &str) -> Command {
    let mut command = command(&[args, &["--", "sh", "-c", script, "it's me"]].concat());
    command.env("PATH", path);
    command
}

#[test]
fn processes_on_other_hosts_know_who_they_are() {
    let (folder, path) = ssh();
    let script = r#"echo $SSH_HOST $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR "$MORE" "$0"; echo same $MASTER_PORT ${#ANYMESH_TOKEN} $ANYMESH_TOKEN; echo dir $(pwd)"#;
    let more = "MORE=it's $HOME; \"x\"";
    let args = ["--no-prefix", "--hosts", "a:1,user@b:2", "--env", more];
    let output = remote(&path, &args, script)
        .current_dir(&folder.0)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", err(&output));
    let text = out(&output);
    let lines = sorted(&text);
    let value = "it's $HOME; \"x\" it's me";
    assert_eq!(lines[0], format!("a 0 3 0 1 a {value}"));
    let here = folder.0.canonicalize().unwrap();
    assert_eq!(lines[1], format!("dir {}", here.display()));
    assert_eq!((lines[1], lines[1]), (lines[2], lines[3]));
    assert!(lines[4].contains(" 32 "), "{}", lines[4]);
    assert_eq!((lines[4], lines[4]), (lines[5], lines[6]));
    assert_eq!(lines[7], format!("user@b 1 3 0 2 a {value}"));
    assert_eq!(lines[8], format!("user@b 2 3 1 2 a {value}"));
}

#[test]
fn ends_and_signals_go_to_other_hosts_and_back() {
    let (_folder, path) = ssh();
    let output = remote(&path, &["-n", "2", "--hosts", "a,b"], "exit 7")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(7));

    let killed = "[ $RANK = 1 ] && kill -s KILL $$; exec sleep 600";
    let output = remote(
        &path,
        &["-n", "2", "--hosts", "a,b", "--grace", "0.2"],
        killed,
    )
    .output()
    .unwrap();
    assert_eq!(output.status.code(), Some(137));
    let text = err(&output);
    assert!(
        text.contains("process 1 (on b) failed first: killed by SIGKILL"),
        "{text}"
    );
    assert!(
        text.contains("process 0: killed by SIGTERM, told to end"),
        "{text}"
    );

    let script = "trap 'echo saved; exit 0' TERM; echo ready; while true; do sleep 0.02; done";
    let mut running = Running::start(remote(&path, &["-n", "2", "--hosts", "a,b"], script));
    running.next(2);
    running.signal("TERM");
    assert_eq!(running.next(2), ["[0] saved", "[1] saved"]);
    assert_eq!(running.code(), Some(0));
}

#[test]
fn nothing_is_left_on_other_hosts_when_launch_is_killed() {
    let (folder, path) = ssh();
    let flight = folder.path("flight");
    let script = "trap '' TERM HUP INT; sleep 600 & echo pid $!; echo pid $$; wait; sleep 600";
    let args = [
        "-n",
        "2",
        "--hosts",
        "a,b",
        "--flight",
        flight.to_str().unwrap(),
    ];
    let mut running = Running::start(remote(&path, &args, script));
    let pids = last_words(&running.next(4));
    assert!(pids.iter().all(|pid| alive(pid)));
    running.signal("KILL");
    running.child.wait().unwrap();
    all_gone(&pids);
}

#[test]
fn a_host_that_is_lost_is_left_out_of_an_elastic_restart() {
    let (_folder, path) = ssh();
    let args = [
        "--hosts",
        "a:1,unreachable:2,b:1",
        "--restarts",
        "2",
        "--min",
        "2",
        "--no-prefix",
    ];
    let script =
        "[ $ANYMESH_RESTART = 0 ] && { sleep 0.5; exit 1; }; echo $SSH_HOST $RANK $WORLD_SIZE";
    let output = remote(&path, &args, script).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", err(&output));
    assert_eq!(sorted(&out(&output)), ["a 0 2", "b 1 2"]);
}

#[test]
fn a_program_or_folder_that_is_not_there_is_told() {
    let (_folder, path) = ssh();
    let output = command(&["-n", "1", "--hosts", "a", "--", "no-such-program"])
        .env("PATH", &path)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(127));
    assert!(err(&output).contains("no-such-program"), "{}", err(&output));
}
