--[[
Ends a swap that went well and grants its waiter; if that one has gone, its job's next; else whoever is next.
ARGV  1 floor  2 swap  3 epoch  4 how (first load | restored | no-op | out: for nobody)
Reply ok waiter (or '') | stale counter | open node (or '': there is none) | crowded job
Events SwapFinished, LeaseGranted
--]]
-- @include group waiters gangs residency lease advance
local how = ARGV[4]

begin(true)
if S.closed == 'promoted ' .. ARGV[2] and S.owner_epoch == tonumber(ARGV[3]) then
  return { 'ok', S.closed_for } -- asked again
end
if not is_swap(ARGV[2], ARGV[3]) then
  return { 'stale', S.counter }
end
local nodes = redis.call('ZRANGE', nodes_key, 0, -1)
if #nodes == 0 then
  return { 'open', '' } -- nobody is left who could have done it
end
for _, node in ipairs(nodes) do
  local at = node .. '/@/'
  local seen = redis.call('HMGET', members_key, at .. 'swap', at .. 'step')
  if seen[1] ~= ARGV[2] or seen[2] ~= 'done' then
    return { 'open', node }
  end
end
for other, where in pairs(residency_of_jobs()) do
  if other ~= S.swap_job and not OUT[where] then
    return { 'crowded', other }
  end
end
settle_clock()
local waiter, job, took = S.swap_waiter, S.swap_job, now - S.swap_since_ms
emit('SwapFinished', 'swap', ARGV[2], 'job', job, 'how', how, 'swap_ms', digits(took))
end_eviction('')
set('changed_ms', now)
clear_swap()
reap()
if job ~= '' and not is_closed() then
  local candidates = redis.call('ZRANGE', queue_key, 0, -1)
  table.insert(candidates, 1, waiter)
  for _, candidate in ipairs(candidates) do
    if redis.call('ZSCORE', queue_key, candidate) and is_alive(candidate) then
      local record = waiter_get(candidate)
      if record.job == job then
        grant(candidate, record, how, took)
        break
      end
    end
  end
end
if S.lease_id == '' then
  advance()
end
set('closed', 'promoted ' .. ARGV[2])
set('closed_for', S.lease_id)
save()
return { 'ok', S.lease_id }
