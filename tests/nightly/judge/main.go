// Judge decides whether the histories of the end-to-end tests are linearizable.
//
//	go run . FILE...
//
// A file has one operation of a client in each line, as tests/src/registers.rs writes them. Each block
// is a register. If the operations on a block have no linear order, the judge prints the fewest of them
// that show it, and the exit status is 1.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"sort"
	"time"

	"github.com/anishathalye/porcupine"
)

// timeMax is the longest search for an order of the operations on one block. Chosen by hand.
const timeMax = 2 * time.Minute

// operation is one line of a history. Contents that no value has are the value null.
type operation struct {
	Client   int     `json:"client"`
	Block    uint64  `json:"block"`
	Kind     string  `json:"kind"`
	Value    *uint64 `json:"value"`
	CallNs   int64   `json:"call_ns"`
	ReturnNs *int64  `json:"return_ns"`
	Outcome  string  `json:"outcome"`
}

func (one operation) isWrite() bool { return one.Kind == "write" }
func (one operation) isDone() bool  { return one.ReturnNs != nil }

// request is the input of a register.
type request struct {
	isWrite bool
	value   uint64
}

// register has the value 0 at first. Its state is a value, its output the value that was read.
var register = porcupine.Model{
	Init: func() any { return uint64(0) },
	Step: func(state, input, output any) (bool, any) {
		asked := input.(request)
		if asked.isWrite {
			return true, asked.value
		}
		return output == state, state
	},
}

// read parses a history.
func read(from io.Reader) ([]operation, error) {
	var operations []operation
	lines := bufio.NewScanner(from)
	for number := 1; lines.Scan(); number++ {
		var one operation
		if err := json.Unmarshal(lines.Bytes(), &one); err != nil {
			return nil, fmt.Errorf("line %d: %w", number, err)
		}
		if one.Kind != "read" && one.Kind != "write" || one.isWrite() && one.Value == nil {
			return nil, fmt.Errorf("line %d: not an operation", number)
		}
		operations = append(operations, one)
	}
	return operations, lines.Err()
}

// relevant leaves out operations that allow nothing and demand nothing: reads without an answer, and
// writes without an answer whose value no read returned.
func relevant(operations []operation) []operation {
	wasRead := map[uint64]bool{}
	for _, one := range operations {
		if !one.isWrite() && one.isDone() && one.Value != nil {
			wasRead[*one.Value] = true
		}
	}
	var kept []operation
	for _, one := range operations {
		if one.isDone() || one.isWrite() && wasRead[*one.Value] {
			kept = append(kept, one)
		}
	}
	return kept
}

// check searches an order of the operations on one block.
func check(operations []operation) porcupine.CheckResult {
	var history []porcupine.Operation
	for _, one := range relevant(operations) {
		checked := porcupine.Operation{ClientId: one.Client, Call: one.CallNs, Return: math.MaxInt64}
		if one.isDone() {
			checked.Return = *one.ReturnNs
		}
		if one.isWrite() {
			checked.Input = request{isWrite: true, value: *one.Value}
		} else if checked.Input = (request{}); one.Value != nil {
			checked.Output = *one.Value
		}
		history = append(history, checked)
	}
	return porcupine.CheckOperationsTimeout(register, history, timeMax)
}

// partition is the history of one block.
type partition struct {
	block      uint64
	operations []operation
}

func partitions(operations []operation) []partition {
	byBlock := map[uint64][]operation{}
	for _, one := range operations {
		byBlock[one.Block] = append(byBlock[one.Block], one)
	}
	var all []partition
	for block, operations := range byBlock {
		sort.SliceStable(operations, func(i, j int) bool { return operations[i].CallNs < operations[j].CallNs })
		all = append(all, partition{block, operations})
	}
	sort.Slice(all, func(i, j int) bool { return all[i].block < all[j].block })
	return all
}

// shrink leaves out operations of an illegal partition as long as the others are illegal, too. A write
// stays as long as a read that returned its value does: without it the read would be wrong, which the
// whole history may not be.
func shrink(operations []operation) []operation {
	isIllegal := func(some []operation) bool { return check(some) == porcupine.Illegal }
	// The first operations that are illegal: a prefix in the order of calls.
	count := sort.Search(len(operations), func(count int) bool { return isIllegal(operations[:count]) })
	kept := append([]operation{}, operations[:count]...)
	// A write may go once all reads of its value have gone: the last step is repeated.
	for step, before := (len(kept)+1)/2, 0; step > 1 || before != len(kept); step = max(step/2, 1) {
		before = len(kept)
		for at := 0; at < len(kept); {
			end := min(at+step, len(kept))
			fewer := append(append([]operation{}, kept[:at]...), kept[end:]...)
			if hasWrites(fewer, operations) && isIllegal(fewer) {
				kept = fewer
			} else {
				at = end
			}
		}
	}
	return kept
}

// hasWrites tells whether the values that were read in some operations were written there, unless all
// operations lack the write, too.
func hasWrites(some, all []operation) bool {
	written := func(operations []operation) map[uint64]int {
		count := map[uint64]int{}
		for _, one := range operations {
			if one.isWrite() {
				count[*one.Value]++
			}
		}
		return count
	}
	in, of := written(some), written(all)
	for _, one := range some {
		if !one.isWrite() && one.Value != nil && in[*one.Value] < of[*one.Value] {
			return false
		}
	}
	return true
}

// verdict is the result for one history.
type verdict struct {
	operationCount, blockCount int
	// smallest is the illegal partition with the fewest operations that show it.
	smallest *partition
	illegal  []uint64
	// undecided are blocks whose operations have so many orders that the search took too long.
	undecided []uint64
}

func judge(operations []operation) verdict {
	all := partitions(operations)
	found := verdict{operationCount: len(operations), blockCount: len(all)}
	for _, one := range all {
		switch check(one.operations) {
		case porcupine.Unknown:
			found.undecided = append(found.undecided, one.block)
		case porcupine.Illegal:
			found.illegal = append(found.illegal, one.block)
			few := shrink(one.operations)
			if found.smallest == nil || len(few) < len(found.smallest.operations) {
				found.smallest = &partition{one.block, few}
			}
		}
	}
	return found
}

func (found verdict) isLegal() bool { return len(found.illegal)+len(found.undecided) == 0 }

func (found verdict) print(to io.Writer, name string) {
	fmt.Fprintf(to, "%s: %d operations on %d blocks, %d blocks without a linear order, %d undecided\n", name,
		found.operationCount, found.blockCount, len(found.illegal), len(found.undecided))
	if found.smallest == nil {
		return
	}
	fmt.Fprintf(to, "block %d:\n", found.smallest.block)
	for _, one := range found.smallest.operations {
		line, _ := json.Marshal(one)
		fmt.Fprintf(to, "  %s\n", line)
	}
}

func judgeFile(path string) (verdict, error) {
	file, err := os.Open(path)
	if err != nil {
		return verdict{}, err
	}
	defer file.Close()
	operations, err := read(file)
	if err != nil {
		return verdict{}, fmt.Errorf("%s: %w", path, err)
	}
	return judge(operations), nil
}

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "judge FILE...: decides whether histories of blocks are linearizable")
		os.Exit(2)
	}
	status := 0
	for _, path := range os.Args[1:] {
		found, err := judgeFile(path)
		if err != nil {
			fmt.Fprintln(os.Stderr, "judge:", err)
			os.Exit(2)
		}
		found.print(os.Stdout, path)
		if !found.isLegal() {
			status = 1
		}
	}
	os.Exit(status)
}
