//! Starting again after a failure.

use super::*;

#[test]
fn restarts_are_counted_and_have_tokens_of_their_own() {
    let script = "echo $ANYMESH_RESTART $ANYMESH_TOKEN $ANYMESH_RUN; [ $ANYMESH_RESTART = 2 ] || exit 6; exit 0";
    let output = shell(&["-n", "2", "--restarts", "5", "--no-prefix"], script);
    assert_eq!(output.status.code(), Some(0));
    let text = out(&output);
    let words: Vec<Vec<&str>> = sorted(&text)
        .iter()
        .map(|line| line.split(' ').collect())
        .collect();
    let numbers: Vec<&str> = words.iter().map(|line| line[0]).collect();
    assert_eq!(numbers, ["0", "0", "1", "1", "2", "2"]);
    let tokens: BTreeSet<&str> = words.iter().map(|line| line[1]).collect();
    let runs: BTreeSet<&str> = words.iter().map(|line| line[2]).collect();
    assert_eq!((tokens.len(), runs.len()), (3, 1));
    let text = err(&output);
    assert!(text.contains("restart 2 of 5 with 2 processes"), "{text}");
    assert!(!text.contains("restart 3"), "{text}");
}

#[test]
fn when_restarts_are_used_up_the_last_failure_is_the_answer() {
    let script = "echo run; [ $ANYMESH_RESTART = 2 ] && exit 9; exit 8";
    let output = shell(&["-n", "1", "--restarts", "2"], script);
    assert_eq!(output.status.code(), Some(9));
    assert_eq!(out(&output).lines().count(), 3);
}

#[test]
fn an_elastic_run_goes_on_without_the_dead() {
    let script = "echo $ANYMESH_RESTART $RANK $WORLD_SIZE; [ $WORLD_SIZE = 2 ] && exit 0; [ $RANK = 1 ] && kill -s KILL $$; sleep 0.5; exit 1";
    let args = ["-n", "4", "--restarts", "5", "--min", "2", "--no-prefix"];
    let output = shell(&args, script);
    assert_eq!(output.status.code(), Some(0));
    let expected = [
        "0 0 4", "0 1 4", "0 2 4", "0 3 4", "1 0 3", "1 1 3", "1 2 3", "2 0 2", "2 1 2",
    ];
    assert_eq!(sorted(&out(&output)), expected);
}

#[test]
fn an_elastic_run_ends_when_too_few_are_left() {
    let script = "[ $RANK = 0 ] && kill -s KILL $$; sleep 0.3; exit 1";
    let output = shell(&["-n", "3", "--restarts", "5", "--min", "2"], script);
    assert_eq!(output.status.code(), Some(137));
    let text = err(&output);
    assert!(text.contains("restart 1 of 5 with 2 processes"), "{text}");
    assert!(
        text.contains("1 processes are left, and --min is 2"),
        "{text}"
    );
}
