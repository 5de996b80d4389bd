--[[
Asks for the group, or refreshes a wait. The same waiter id always gets the same answer.
ARGV  1 floor  2 waiter  3 job  4 host  5 pid  6 start  7 priority  8 label  9 lease_ms  10 ttl_ms
      11 'lock' to declare the group lock-only, else ''  12 score of an earlier entry, or ''
Reply granted token how swap_ms counter mode registered deadline_ms needs_weights
      queued position score phase reason holder holder_ms counter mode registered
      ended | mode <mode of the group> | full most (so many wait already)
Events LeaseGranted, WaiterQueued, and what advance and reap emit
--]]
-- @include group waiters gangs residency lease advance asking
local waiter, job, host, pid, start = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local priority, label, lease_ms, ttl_ms = tonumber(ARGV[7]), ARGV[8], tonumber(ARGV[9]), tonumber(ARGV[10])
local wanted_mode = ARGV[11]

begin(false, FIELD_MAX)
local place = old_place(ARGV[12])
if has_ended(waiter) then
  return { 'ended' }
end
if wanted_mode ~= '' and S.mode ~= '' and S.mode ~= wanted_mode then
  return { 'mode', S.mode }
end
settle_clock()
if S.mode == '' and wanted_mode ~= '' then
  set('mode', wanted_mode)
end
if S.lease_id == waiter and S.deadline_ms >= now then
  set('confirmed', '1') -- it asks itself, so it lives
  set('renewed_at_ms', now)
  set('deadline_ms', now + S.lease_ms)
else
  reap()
  if is_too_many(waiter, place) then
    return turn_away()
  end
  ask(waiter, {
    job = job, host = host, pid = pid, start = start, priority = priority, label = label, lease_ms = lease_ms,
    ttl_ms = ttl_ms, enqueued_at_ms = digits(now), fresh = true,
  }, place)
end
save()
return answer(waiter, job, host, pid, start)
